from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.client.framing import END, MAX_FRAME, Decoder, Frame, encode
from aenv.errors import OperationFailed

frames = st.lists(st.builds(Frame, st.sampled_from([0, END]), st.binary(max_size=300)), max_size=20)


@given(frames, st.data())
def test_frames_survive_any_way_of_cutting_the_stream(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(encode(frame.payload, frame.flags) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    decoder = Decoder()
    received: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += decoder.feed(stream[start:end])
    assert received == sent
    assert decoder.pending == 0


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_frames_or_refused_and_never_hoarded(stream: bytes) -> None:
    decoder = Decoder(limit=100)
    try:
        for byte in stream:
            for frame in decoder.feed(bytes((byte,))):
                assert len(frame.payload) <= 100
            assert decoder.pending <= 105
    except OperationFailed:
        pass


def test_a_frame_above_the_limit_is_refused_before_it_arrives() -> None:
    decoder = Decoder()
    with pytest.raises(OperationFailed, match=f"{MAX_FRAME + 1} bytes is too large"):
        list(decoder.feed(b"\0" + (MAX_FRAME + 1).to_bytes(4, "big")))


def test_a_compressed_frame_is_refused() -> None:
    with pytest.raises(OperationFailed, match="flags are 0x01"):
        list(Decoder().feed(encode(b"{}", 1)))


def test_an_unfinished_frame_is_pending() -> None:
    decoder = Decoder()
    assert list(decoder.feed(encode(b"abc")[:-1])) == []
    assert decoder.pending == 7
