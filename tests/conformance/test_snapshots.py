"""What every VMM driver promises of machines that are saved and restored, shown on real guests."""

from __future__ import annotations

from tests.conformance import capture
from tests.conformance.guests import Guest, restore
from tests.conformance.machines import Lab


async def test_a_restored_machine_is_the_saved_one(lab: Lab) -> None:
    guest = await Guest.boot(lab)
    await guest.ask("fill 5 3 9")
    await guest.ask("write 6 1 2")
    contents = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    whole = capture.digest(guest.machine.record.pid, await guest.memory())
    assert capture.image_digest(snapshot.memory) == whole
    await guest.machine.kill()

    again = await restore(lab, snapshot, run=False)
    assert await again.machine.status() == "paused"
    assert capture.digest(again.machine.record.pid, await again.memory()) == whole
    await again.machine.resume()
    assert await again.contents() == contents
    assert await again.sum() == f"{contents} orders={again.number}"
