//! Layers that are somewhere else.
//!
//! A remote layer is named by its digest. Its bytes come from an *origin*, which somebody else runs: it knows registries,
//! buckets and credentials, and answers byte ranges over a Unix socket ([`http`]). What was fetched once is kept in a
//! [`cache`] of bounded size, in chunks of 256 KiB; a guest waits for the chunk it needs and for nothing else.
//!
//! What arrives is checked as far as the layer's name allows: with a list of chunk digests, every chunk is, before
//! anyone sees a byte of it. Without, the checksums inside a zfile are what there is.

mod blob;
pub mod cache;
pub mod http;
mod journal;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;

use lsmt::source::ReadAt;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::blob::Blob;
pub use self::cache::Cache;

/// Bytes in a chunk, the unit in which remote layers are fetched, checked, kept and evicted.
pub const CHUNK: u64 = 256 << 10;
/// Largest remote layer in bytes.
const MAX_SIZE: u64 = 1 << 42;

/// A place that has remote layers. Calls block, from many threads at once.
pub trait Origin: Send + Sync {
    /// Fills `buf` with the bytes of blob `digest` from `offset` on. `NotFound`, `InvalidInput` and `PermissionDenied`
    /// are final; other errors may pass.
    fn read(&self, digest: &str, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// The SHA-256 digests of all chunks of a blob of `size` bytes, 32 bytes each.
    fn chunk_digests(&self, digest: &str, size: u64) -> io::Result<Vec<u8>>;
}

/// Name of a remote layer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Remote {
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Bytes.
    pub size: u64,
    /// Digest of the concatenated digests of all chunks, in the same form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<String>,
}

impl Remote {
    /// Refuses what cannot be the name of a layer.
    pub fn check(&self) -> Result<(), String> {
        for digest in std::iter::once(&self.digest).chain(&self.chunks) {
            if parse_digest(digest).is_none() {
                return Err(format!(
                    "a digest is sha256: and 64 hexadecimal digits in lower case, not {digest:?}"
                ));
            }
        }
        if self.size == 0 || self.size > MAX_SIZE {
            return Err(format!(
                "a remote layer has 1 to {MAX_SIZE} bytes, not {}",
                self.size
            ));
        }
        Ok(())
    }

    /// The digest as bytes.
    pub fn key(&self) -> Option<[u8; 32]> {
        parse_digest(&self.digest)
    }

    /// Text form for manifests, without spaces.
    pub fn to_text(&self) -> String {
        let chunks = self.chunks.as_deref().unwrap_or("-");
        format!("{} {} {chunks}", self.digest, self.size).replace(' ', ",")
    }

    /// From the text form.
    pub fn from_text(text: &str) -> Option<Remote> {
        let mut fields = text.split(',');
        let remote = Remote {
            digest: fields.next()?.to_owned(),
            size: fields.next()?.parse().ok()?,
            chunks: Some(fields.next()?.to_owned()).filter(|chunks| chunks != "-"),
        };
        remote.check().ok().map(|()| remote)
    }
}

fn parse_digest(text: &str) -> Option<[u8; 32]> {
    let hex = text.strip_prefix("sha256:")?;
    let plain = hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !plain {
        return None;
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// A remote layer as a source of bytes.
pub struct RemoteSource {
    cache: Arc<Cache>,
    blob: Arc<Blob>,
    /// The layer is being opened: what is read now is needed again after a restart, when nobody can wait for an origin.
    opening: AtomicBool,
}

impl RemoteSource {
    /// Opens a remote layer. Asks the origin for the digests of its chunks, if it is named with them and they are not
    /// here yet.
    pub fn open(cache: &Arc<Cache>, remote: &Remote) -> io::Result<RemoteSource> {
        Ok(RemoteSource {
            blob: cache.blob(remote)?,
            cache: cache.clone(),
            opening: AtomicBool::new(true),
        })
    }

    /// From now on chunks that are read may go again.
    pub fn opened(&self) {
        self.opening.store(false, Relaxed);
    }
}

impl Drop for RemoteSource {
    fn drop(&mut self) {
        self.blob.unpin();
    }
}

impl ReadAt for RemoteSource {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.blob.size().saturating_sub(offset)) as usize;
        let pin = self.opening.load(Relaxed);
        self.cache.read(&self.blob, &mut buf[..len], offset, pin)?;
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.blob.size()
    }

    fn forget(&self, offset: u64, len: u64) {
        self.cache.forget(&self.blob, offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_their_text_form() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        for chunks in [None, Some(digest.clone())] {
            let remote = Remote {
                digest: digest.clone(),
                size: 12345,
                chunks,
            };
            assert_eq!(Remote::from_text(&remote.to_text()), Some(remote));
        }
        for wrong in ["", "sha256:00", &digest.to_uppercase(), &digest[1..]] {
            assert!(parse_digest(wrong).is_none(), "{wrong}");
        }
        assert_eq!(Remote::from_text(&format!("{digest},0,-")), None);
    }
}
