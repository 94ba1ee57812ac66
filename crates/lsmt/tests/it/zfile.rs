//! zfiles of the reference implementation are read, ours are read back, and the tar wrap is the same to the byte.

use std::io::{Cursor, Write};

use lsmt::source::ReadAt;
use lsmt::zfile::{Algorithm, Options, ZFile, ZWriter};
use lsmt::{blob, tar, Error};

use crate::support::*;

const OF_MIXED: [&str; 11] = [
    "z-lz4-4k.zf",
    "z-lz4-16k.zf",
    "z-lz4-4k-mt.zf",
    "z-lz4-4k-nocrc.zf",
    "z-lz4-4k-noover.zf",
    "z-lz4-64k-refcannotread.zf",
    "z-zstd-4k.zf",
    "z-zstd-32k.zf",
    "z-tar-lz4-4k.tar",
    "z-tar-zstd-16k.tar",
    "e0-ext4.obd.tar",
];

fn plain_of(name: &str) -> Vec<u8> {
    match name {
        "z-odd-lz4-4k.zf" | "z-odd-zstd-8k.zf" => bytes("lsmt/odd.bin"),
        "z-tiny-lz4-4k.zf" => bytes("lsmt/tiny.bin"),
        "e0-ext4.obd.tar" => bytes("lsmt/e0-ext4.commit"),
        _ => bytes("lsmt/l02-mixed.commit"),
    }
}

#[test]
fn all_containers_of_the_reference_are_read() {
    for name in OF_MIXED
        .iter()
        .chain(&["z-odd-lz4-4k.zf", "z-odd-zstd-8k.zf", "z-tiny-lz4-4k.zf"])
    {
        let (plain, wrapping) = blob::unwrap(source(&format!("lsmt/{name}"))).unwrap();
        assert!(wrapping.zfile, "{name}");
        let expected = plain_of(name);
        assert_same(&content(&*plain), &expected, name);
        for (offset, length) in [
            (0, 1),
            (4095, 2),
            (5000, 70_000),
            (expected.len().saturating_sub(3), 10),
        ] {
            let mut part = vec![0; length];
            let got = plain.read_at(&mut part, offset as u64).unwrap();
            assert_eq!(
                got,
                length.min(expected.len().saturating_sub(offset)),
                "{name}"
            );
            assert_same(
                &part[..got],
                &expected[offset.min(expected.len())..][..got],
                name,
            );
        }
    }
}

#[test]
fn the_jump_table_stays_small() {
    let zfile = ZFile::open(source("real/ext4_64")).unwrap();
    let blocks = zfile.size().div_ceil(4096);
    assert!(
        zfile.memory() as u64 <= blocks * 9 / 4 + 64,
        "{} bytes for {blocks} blocks",
        zfile.memory()
    );
}

fn build(plain: &[u8], options: Options) -> (Vec<u8>, Vec<u8>) {
    let feed = |mut writer: ZWriter<Cursor<Vec<u8>>>| {
        for chunk in plain.chunks(70_001) {
            writer.write_all(chunk).unwrap();
        }
        writer
    };
    let (streamed, length) = feed(ZWriter::new(Cursor::new(Vec::new()), options).unwrap())
        .finish()
        .unwrap();
    assert_eq!(streamed.get_ref().len() as u64, length);
    let (sought, length) = feed(ZWriter::new(Cursor::new(Vec::new()), options).unwrap())
        .finish_seekable()
        .unwrap();
    assert_eq!(
        (sought.get_ref().len() as u64, sought.position()),
        (length, length)
    );
    (streamed.into_inner(), sought.into_inner())
}

#[test]
fn what_is_written_is_read_back_whatever_the_options() {
    let mixed = [bytes("lsmt/l02-mixed.commit"), bytes("lsmt/s0-base.data")].concat();
    for plain in [
        &mixed[..],
        &mixed[..1],
        &mixed[..4096],
        &mixed[..262_145],
        &[],
    ] {
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            for (block_size, verify) in [(4096, true), (4096, false), (32768, true)] {
                let options = Options {
                    algorithm,
                    block_size,
                    verify,
                    workers: 0,
                };
                let (streamed, sought) = build(plain, options);
                for blob in [&streamed, &sought] {
                    let zfile = ZFile::open(blob).unwrap();
                    assert_eq!(
                        (zfile.block_size(), zfile.has_checksums()),
                        (block_size, verify)
                    );
                    assert_same(&content(&zfile), plain, "round trip");
                }
                assert_eq!(streamed[512..], sought[512..], "only the header differs");
                let parallel = build(
                    plain,
                    Options {
                        workers: 3,
                        ..options
                    },
                );
                assert!(parallel == (streamed, sought), "threads change nothing");
            }
        }
    }
}

#[test]
fn headers_are_those_of_the_reference() {
    // Compressed bytes may differ, so compare what does not depend on them.
    let plain = bytes("lsmt/l02-mixed.commit");
    let (streamed, sought) = build(&plain, Options::default());
    let flags =
        |blob: &[u8], at: usize| u64::from_le_bytes(blob[at + 32..at + 40].try_into().unwrap());
    for (ours, theirs) in [
        (streamed, bytes("lsmt/z-lz4-4k-noover.zf")),
        (sought, bytes("lsmt/z-lz4-4k.zf")),
    ] {
        assert_eq!(flags(&ours, 0), flags(&theirs, 0));
        assert_eq!(
            flags(&ours, ours.len() - 512),
            flags(&theirs, theirs.len() - 512)
        );
        assert_eq!(ours[72..512], theirs[72..512]);
        if flags(&theirs, 0) == 0x13 {
            assert_eq!(
                ours[..512],
                theirs[..512],
                "the header of a stream depends on the options only"
            );
        }
        let ratio = ours.len() as f64 / theirs.len() as f64;
        assert!(
            ratio < 1.02,
            "{} bytes, the reference needs {}",
            ours.len(),
            theirs.len()
        );
    }
}

#[test]
fn a_damaged_block_is_an_error_and_names_the_block() {
    let good = bytes("lsmt/z-lz4-4k.zf");
    let mut bad = good.clone();
    bad[600] ^= 1;
    let zfile = ZFile::open(&bad).unwrap();
    let error = zfile.read_at(&mut [0; 10], 0).unwrap_err().to_string();
    assert!(
        error.contains("block 0") && error.contains("checksum"),
        "{error}"
    );
    zfile.read_exact_at(&mut [0; 10], 50 * 4096).unwrap();
}

#[test]
fn a_damaged_cache_heals_itself() {
    struct Cache {
        truth: Vec<u8>,
        damaged: std::sync::Mutex<bool>,
    }
    impl ReadAt for Cache {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
            let got = self.truth.read_at(buf, offset)?;
            if *self.damaged.lock().unwrap() && offset == 512 {
                buf[3] ^= 0x40;
            }
            Ok(got)
        }
        fn size(&self) -> u64 {
            self.truth.size()
        }
        fn forget(&self, offset: u64, _len: u64) {
            assert_eq!(offset, 512);
            *self.damaged.lock().unwrap() = false;
        }
    }
    let zfile = ZFile::open(Cache {
        truth: bytes("lsmt/z-zstd-4k.zf"),
        damaged: true.into(),
    })
    .unwrap();
    assert_same(
        &content(&zfile),
        &bytes("lsmt/l02-mixed.commit"),
        "after the cache was told",
    );
}

#[test]
fn block_sizes_the_reference_cannot_read_are_not_written() {
    for block_size in [0, 512, 5000, 65536] {
        let options = Options {
            block_size,
            ..Options::default()
        };
        assert!(matches!(
            ZWriter::new(Vec::new(), options),
            Err(Error::Argument(_))
        ));
    }
}

#[test]
fn the_tar_wrap_is_the_references() {
    for name in [
        "lsmt/z-tar-lz4-4k.tar",
        "lsmt/e0-ext4.obd.tar",
        "lsmt/z-tar-zstd-16k.tar",
    ] {
        let archive = bytes(name);
        let range = tar::locate(&archive).unwrap().unwrap();
        assert_eq!(range.start, tar::CONTENT);
        let content = &archive[range.start as usize..range.end as usize];
        let mut ours = tar::head(content.len() as u64).to_vec();
        ours.extend_from_slice(content);
        tar::write_tail(content.len() as u64, &mut ours).unwrap();
        assert_same(&ours, &archive, name);
    }
}
