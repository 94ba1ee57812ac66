//! Parts of files as response bodies.

use bytes::Bytes;
use flate2::write::GzEncoder;
use flate2::Compression;
use hyper::body::{Body, Frame, SizeHint};
use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use tokio::task::JoinHandle;

/// Bytes read at once.
const READ_SIZE: u64 = 256 << 10;

type Encoder = GzEncoder<Vec<u8>>;

/// A range of a file, plain or compressed. No thread is held while the client reads slowly.
pub struct FileBody {
    file: Arc<File>,
    offset: u64,
    left: u64,
    compressed: bool,
    /// Between two reads: the compression so far.
    encoder: Option<Encoder>,
    reading: Option<JoinHandle<io::Result<Piece>>>,
}

struct Piece {
    read: u64,
    data: Vec<u8>,
    encoder: Option<Encoder>,
}

impl FileBody {
    pub fn plain(file: File, offset: u64, left: u64) -> FileBody {
        FileBody {
            file: Arc::new(file),
            offset,
            left,
            compressed: false,
            encoder: None,
            reading: None,
        }
    }

    pub fn gzip(file: File, left: u64) -> FileBody {
        let encoder = GzEncoder::new(Vec::new(), Compression::fast());
        FileBody {
            encoder: Some(encoder),
            compressed: true,
            ..FileBody::plain(file, 0, left)
        }
    }
}

/// Reads `size` bytes at `offset`, and compresses them if there is an encoder, which is finished with
/// the `last` piece.
fn read(
    file: &File,
    offset: u64,
    size: u64,
    last: bool,
    encoder: Option<Encoder>,
) -> io::Result<Piece> {
    let mut data = vec![0; size as usize];
    // Its length is promised, or it would look complete: the connection has to break.
    file.read_exact_at(&mut data, offset)?;
    let Some(mut encoder) = encoder else {
        return Ok(Piece {
            read: size,
            data,
            encoder: None,
        });
    };
    encoder.write_all(&data)?;
    if last {
        return Ok(Piece {
            read: size,
            data: encoder.finish()?,
            encoder: None,
        });
    }
    let data = std::mem::take(encoder.get_mut());
    Ok(Piece {
        read: size,
        data,
        encoder: Some(encoder),
    })
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        while this.left > 0 {
            let reading = this.reading.get_or_insert_with(|| {
                let (file, offset, size) =
                    (this.file.clone(), this.offset, this.left.min(READ_SIZE));
                let (last, encoder) = (size == this.left, this.encoder.take());
                tokio::task::spawn_blocking(move || read(&file, offset, size, last, encoder))
            });
            let piece = ready!(Pin::new(reading).poll(cx)).map_err(io::Error::other)??;
            this.reading = None;
            this.encoder = piece.encoder;
            this.offset += piece.read;
            this.left -= piece.read;
            // The encoder may keep a piece to itself.
            if !piece.data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece.data.into()))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        match self.compressed {
            true => SizeHint::default(),
            false => SizeHint::with_exact(self.left),
        }
    }
}
