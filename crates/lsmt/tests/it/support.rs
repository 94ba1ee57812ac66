//! Fixtures and reference content.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use lsmt::layer::{Layer, LayerKey};
use lsmt::source::{FileSource, ReadAt};
use lsmt::stack::Stack;

/// Directory with the unpacked layer files that come from the reference implementation.
pub fn fixtures() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let archive =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/overlaybd-vectors.tar.zst");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("overlaybd-vectors");
        if !target.exists() {
            // Unpacked beside and renamed, so that an interrupted run leaves nothing half-done.
            let fresh = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let status = Command::new("tar")
                .arg("-xSf")
                .arg(&archive)
                .arg("-C")
                .arg(fresh.path())
                .status();
            assert!(
                status.expect("tar runs").success(),
                "tar cannot unpack {}",
                archive.display()
            );
            if std::fs::rename(fresh.path(), &target).is_err() {
                assert!(
                    target.exists(),
                    "the fixtures cannot be moved to {}",
                    target.display()
                );
            }
        }
        target.join("obd-vectors")
    })
}

pub fn path(name: &str) -> PathBuf {
    fixtures().join(name)
}

pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

pub fn source(name: &str) -> Arc<dyn ReadAt> {
    Arc::new(FileSource::open(path(name)).unwrap())
}

pub fn layer(name: &str) -> Arc<Layer> {
    Arc::new(
        Layer::open(source(name), LayerKey::unique()).unwrap_or_else(|e| panic!("{name}: {e}")),
    )
}

pub fn stack(names: &[&str]) -> Stack {
    Stack::build(names.iter().map(|name| layer(name))).unwrap()
}

/// The whole content of a source.
pub fn content(source: &dyn ReadAt) -> Vec<u8> {
    let mut all = vec![0xa5; source.size() as usize];
    source.read_exact_at(&mut all, 0).unwrap();
    all
}

/// One recorded operation on a disk.
#[derive(Debug, Clone)]
pub struct Op {
    pub kind: char,
    pub offset: u64,
    pub length: u64,
    pub seed: u64,
}

impl Op {
    /// The bytes the operation writes; `None` for a discard.
    pub fn payload(&self) -> Option<Vec<u8>> {
        let words: Box<dyn Fn(u64) -> [u64; 64]> = match self.kind {
            'w' => Box::new(|sector| [self.seed << 32 | sector; 64]),
            'z' => Box::new(|_| [0; 64]),
            'r' => Box::new(|sector| {
                let mut x = 0x9E37_79B9_7F4A_7C15 ^ (self.seed << 32) ^ (sector + 1);
                [(); 64].map(|()| {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    x
                })
            }),
            'd' => return None,
            other => panic!("unknown operation {other}"),
        };
        let sectors = self.offset / 512..(self.offset + self.length) / 512;
        Some(
            sectors
                .flat_map(|s| words(s).into_iter().flat_map(u64::to_le_bytes))
                .collect(),
        )
    }
}

/// Size of the disk and the operations that made a fixture.
pub fn ops(name: &str) -> (u64, Vec<Op>) {
    let json: serde_json::Value = serde_json::from_slice(&bytes(name)).unwrap();
    let ops = json["ops"].as_array().unwrap().iter().map(|op| Op {
        kind: op[0].as_str().unwrap().chars().next().unwrap(),
        offset: op[1].as_u64().unwrap(),
        length: op[2].as_u64().unwrap(),
        seed: op[3].as_u64().unwrap(),
    });
    (json["virtual_size"].as_u64().unwrap(), ops.collect())
}

/// The flat disk that results from operations.
pub fn flat(virtual_size: u64, ops: &[Op]) -> Vec<u8> {
    let mut disk = vec![0; virtual_size as usize];
    for op in ops {
        let range = op.offset as usize..(op.offset + op.length) as usize;
        match op.payload() {
            Some(payload) => disk[range].copy_from_slice(&payload),
            None => disk[range].fill(0),
        }
    }
    disk
}

/// Compares without printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if found == expected {
        return;
    }
    if let Some(at) = (0..found.len()).find(|i| found[*i] != expected[*i]) {
        let end = (at + 16).min(found.len());
        panic!(
            "{what}: byte {at} is {:02x?}, expected {:02x?}",
            &found[at..end],
            &expected[at..end]
        );
    }
}
