//! Hostile input: every parser meets random bytes and damaged files. It may refuse them; it must not panic, must not take
//! memory by the number found in a file, and what it accepts must be readable without a panic.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use lsmt::commit::{self, Options};
use lsmt::entry::Entry;
use lsmt::header::{Header, Identity};
use lsmt::image::Image;
use lsmt::index::Index;
use lsmt::layer::{Layer, LayerKey};
use lsmt::manifest::Manifest;
use lsmt::pair::{self, Repair};
use lsmt::source::ReadAt;
use lsmt::stack::Stack;
use lsmt::upper::{Durability, Upper};
use lsmt::zfile::{self, ZFile, ZWriter};
use lsmt::{blob, sparse, tar, trace, warp};
use proptest::prelude::*;

/// Remembers the largest single allocation.
struct Watch;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system allocator, which upholds the contract.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises about `layout` are the ones asked for.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `alloc` above, which is the system's.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static WATCH: Watch = Watch;

/// More than any legitimate step on these small files needs, less than any number in them would take.
const MOST: usize = 20 << 20;

#[track_caller]
fn check_memory() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= MOST, "{largest} bytes were allocated at once");
}

/// Reads some of an accepted disk, which may be declared to be huge.
fn probe(source: &dyn ReadAt) {
    let mut buf = vec![0; 70_000];
    let size = source.size();
    for offset in [
        0,
        511,
        size / 2,
        size.saturating_sub(5000),
        size,
        u64::MAX - 10,
    ] {
        let _ = source.read_at(&mut buf, offset);
    }
}

fn probe_layer(layer: lsmt::Result<Layer>) {
    let Ok(layer) = layer else { return };
    let layer = Arc::new(layer);
    let Ok(stack) = Stack::build([layer.clone(), layer]) else {
        return;
    };
    probe(&stack);
    let options = Options {
        virtual_size: stack.virtual_size(),
        ..Options::default()
    };
    if stack.merged_index().unwrap().sectors().0 < 4096 {
        let _ = commit::flatten(&stack, &options, &mut std::io::sink());
    }
}

/// Feeds bytes to every parser that reads from a source.
fn feed(bytes: &[u8]) {
    let key = LayerKey::unique();
    let source: Arc<dyn ReadAt> = Arc::new(bytes.to_vec());
    probe_layer(Layer::open(source.clone(), key));
    probe_layer(blob::open_layer(source.clone(), key));
    probe_layer(warp::open(source.clone(), Arc::new(vec![1; 8192]), key));
    if let Ok(zfile) = ZFile::open(source.clone()) {
        probe(&zfile);
    }
    if let Ok(Some(range)) = tar::locate(&source) {
        assert!(range.end <= source.size());
    }
    let _ = trace::read(&source);
    for repair in [Repair::Refuse, Repair::Cut] {
        if let Ok(pair) = pair::read(source.clone(), &source, repair) {
            probe_layer(Ok(pair.layer));
        }
    }
    if let Ok(block) = bytes.get(..4096).unwrap_or(&[0; 4096]).try_into() {
        if let Ok(header) = Header::decode(block, "fuzz") {
            let _ = header.encode();
        }
    }
    check_memory();
}

/// Feeds bytes to the parsers that need a file, as each of the files an image has.
fn feed_files(manifest: &[u8], data: &[u8], journal: &[u8]) {
    let dir = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    let samples = samples();
    let data_path = dir.path().join(&samples.data_name);
    fs::write(dir.path().join("manifest"), manifest).unwrap();
    fs::write(&data_path, data).unwrap();
    fs::write(data_path.with_extension("jrn"), journal).unwrap();
    let _ = Manifest::open(&dir.path().join("manifest"));
    if let Ok(layer) = sparse::open_bottom(Arc::new(fs::File::open(&data_path).unwrap())) {
        probe_layer(Ok(layer));
    }
    let cache = Arc::new(lsmt::cache::ChainCache::new(0));
    let resolve = &mut |_: &str| Err(lsmt::Error::Argument("no lowers".into()));
    if let Ok((image, _)) = Image::open(dir.path(), Durability::Process, cache, resolve) {
        let mut buf = vec![0; 70_000];
        for offset in [0, 777, image.virtual_size() / 2, image.virtual_size()] {
            let _ = image.read(&mut buf, offset);
        }
        let end = image.virtual_size().min(20_000);
        let _ = image.write(0, &vec![3; end as usize]);
        let _ = image.zero(0, end / 2);
        let _ = image.freeze();
        let _ = image.settle(true);
    } else if let Ok((upper, _)) = Upper::open(&data_path, Durability::Process) {
        upper.freeze();
        let _ = upper.seal(false);
    }
    check_memory();
}

/// Small valid files of every kind.
struct Samples {
    sources: Vec<Vec<u8>>,
    data_name: String,
    manifest: Vec<u8>,
    data: Vec<u8>,
    journal: Vec<u8>,
}

fn samples() -> &'static Samples {
    static SAMPLES: OnceLock<Samples> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let content: Vec<u8> = (0..40_000u32).flat_map(|i| (i / 3).to_le_bytes()).collect();
        let index = Index::new(vec![
            Entry::data(3, 100, 8, 0),
            Entry::zeroed(200, 50, 8, 0),
            Entry::data(1000, 64, 150, 0),
        ]);
        let sources: [Arc<dyn ReadAt>; 1] = [Arc::new(content)];
        let options = Options {
            identity: Identity::random(uuid::Uuid::nil()),
            virtual_size: 1 << 20,
            ..Options::default()
        };
        let mut layer = Vec::new();
        commit::commit(&index.unwrap(), &sources, &options, &mut layer).unwrap();
        let mut files = vec![layer.clone()];
        for algorithm in [zfile::Algorithm::Lz4, zfile::Algorithm::Zstd] {
            for seekable in [false, true] {
                let options = zfile::Options {
                    algorithm,
                    ..Default::default()
                };
                let mut writer = ZWriter::new(std::io::Cursor::new(Vec::new()), options).unwrap();
                std::io::Write::write_all(&mut writer, &layer).unwrap();
                let done = if seekable {
                    writer.finish_seekable()
                } else {
                    writer.finish()
                };
                files.push(done.unwrap().0.into_inner());
            }
        }
        let inner = files[1].clone();
        let mut archive = tar::head(inner.len() as u64).to_vec();
        archive.extend_from_slice(&inner);
        tar::write_tail(inner.len() as u64, &mut archive).unwrap();
        files.push(archive);
        let mut recorded = Vec::new();
        trace::write(
            &[trace::Record {
                layer: 0,
                offset: 4096,
                count: 4096,
            }; 5],
            &mut recorded,
        )
        .unwrap();
        files.push(recorded);

        let dir = tempfile::tempdir().unwrap();
        let cache = Arc::new(lsmt::cache::ChainCache::new(0));
        let image = Image::create(dir.path(), &[], 1 << 20, Durability::Flush, cache).unwrap();
        for i in 0..5u64 {
            image.write(i * 9000, &[i as u8 + 1; 10_000]).unwrap();
            image.zero(i * 20_000, 5000).unwrap();
            image.flush().unwrap();
        }
        image.resize(900 << 10).unwrap();
        let upper = image.roles().upper.unwrap();
        let data_name = format!("{upper}.lsmt");
        let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
        Samples {
            sources: files,
            manifest: read("manifest"),
            data: read(&data_name),
            journal: read(&format!("{upper}.jrn")),
            data_name,
        }
    })
}

/// Damage to a file: bytes replaced, a piece cut out, a piece doubled, the end cut off.
#[derive(Debug, Clone)]
enum Damage {
    Set(prop::sample::Index, u8),
    Word(prop::sample::Index, u64),
    Remove(prop::sample::Index, usize),
    Double(prop::sample::Index, usize),
    Truncate(prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let at = any::<prop::sample::Index>;
    let word = prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        Just(0),
        (0u32..64).prop_map(|bit| 1 << bit),
        0..100_000u64
    ];
    let one = prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(i, b)| Damage::Set(i, b)),
        4 => (at(), word).prop_map(|(i, w)| Damage::Word(i, w)),
        1 => (at(), 1usize..600).prop_map(|(i, n)| Damage::Remove(i, n)),
        1 => (at(), 1usize..600).prop_map(|(i, n)| Damage::Double(i, n)),
        1 => at().prop_map(Damage::Truncate),
    ];
    prop::collection::vec(one, 1..4)
}

/// The interesting bytes are at both ends; damage prefers them.
fn place(index: &prop::sample::Index, len: usize) -> usize {
    let near = index.index(3 * len.max(1));
    match near / len.max(1) {
        0 => near.min(len.saturating_sub(1)) % 600.min(len.max(1)),
        1 => len - 1 - (near % 4700.min(len.max(1))).min(len - 1),
        _ => near % len.max(1),
    }
}

fn apply(file: &mut Vec<u8>, damage: &[Damage]) {
    for step in damage {
        if file.is_empty() {
            return;
        }
        let len = file.len();
        match step {
            Damage::Set(i, byte) => file[place(i, len)] = *byte,
            Damage::Word(i, word) => {
                let at = place(i, len) / 8 * 8;
                let end = (at + 8).min(len);
                file[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
            }
            Damage::Remove(i, count) => {
                let at = place(i, len);
                file.drain(at..(at + count).min(len));
            }
            Damage::Double(i, count) => {
                let at = place(i, len);
                let piece = file[at..(at + count).min(len)].to_vec();
                file.splice(at..at, piece);
            }
            Damage::Truncate(i) => file.truncate(place(i, len)),
        }
    }
}

/// Makes the checksums of a damaged zfile right again, so that damage gets past them.
fn mend(file: &mut [u8]) {
    let len = file.len();
    for at in [0, len.saturating_sub(512)] {
        if let Some(block) = file
            .get_mut(at..at + 512)
            .filter(|b| b.starts_with(b"ZFile"))
        {
            block[28..32].fill(0);
            let digest = zfile::raw_crc32c(0, block);
            block[28..32].copy_from_slice(&digest.to_le_bytes());
        }
    }
}

fn cases() -> u32 {
    std::env::var("LSMT_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        feed(&bytes);
    }

    #[test]
    fn random_bytes_behind_a_magic_number(which: prop::sample::Index, bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        let sample = which.get(&samples().sources);
        let mut file = sample[..sample.len().min(60)].to_vec();
        file.extend_from_slice(&bytes);
        file.extend_from_slice(&sample[sample.len().saturating_sub(4096)..]);
        feed(&file);
    }

    #[test]
    fn damaged_files(which: prop::sample::Index, damage in damage(), mended: bool) {
        let mut file = which.get(&samples().sources).clone();
        apply(&mut file, &damage);
        if mended {
            mend(&mut file);
        }
        feed(&file);
    }

    #[test]
    fn damaged_images(damage in damage(), which in 0..4) {
        let s = samples();
        let mut files = [s.manifest.clone(), s.data.clone(), s.journal.clone()];
        match which {
            3 => files.iter_mut().for_each(|file| apply(file, &damage)),
            which => apply(&mut files[which as usize], &damage),
        }
        feed_files(&files[0], &files[1], &files[2]);
    }

    #[test]
    fn damaged_index_files(damage in damage()) {
        let (data, index) = (pair_sample().0.clone(), pair_sample().1.clone());
        let mut broken = index.clone();
        apply(&mut broken, &damage);
        for repair in [Repair::Refuse, Repair::Cut] {
            probe_layer(pair::read(Arc::new(data.clone()), &broken, repair).map(|pair| pair.layer));
        }
        let mut broken = data;
        apply(&mut broken, &damage);
        probe_layer(pair::read(Arc::new(broken), &index, Repair::Cut).map(|pair| pair.layer));
        check_memory();
    }
}

fn pair_sample() -> &'static (Vec<u8>, Vec<u8>) {
    static PAIR: OnceLock<(Vec<u8>, Vec<u8>)> = OnceLock::new();
    PAIR.get_or_init(|| {
        let (data, index) = (
            tempfile::NamedTempFile::new().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let mut writer = pair::PairWriter::create(
            data.reopen().unwrap(),
            index.reopen().unwrap(),
            Identity::random(uuid::Uuid::nil()),
            1 << 20,
            pair::PairOptions::default(),
        )
        .unwrap();
        for i in 0..20u64 {
            writer.write(i * 3072, &[i as u8; 4096]).unwrap();
            writer.discard(i * 7168, 1024).unwrap();
        }
        writer.flush().unwrap();
        (
            fs::read(data.path()).unwrap(),
            fs::read(index.path()).unwrap(),
        )
    })
}

/// A number in a file never sizes an allocation, even when the file claims to be as large as the number needs.
#[test]
fn a_source_that_claims_to_be_huge_costs_nothing() {
    /// A few real bytes at both ends of a file of many exabytes that cannot be read in between.
    struct Huge(Vec<u8>, Vec<u8>, u64);
    impl ReadAt for Huge {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
            let tail = self.2 - self.1.len() as u64;
            match offset {
                at if at >= tail => self.1.as_slice().read_at(buf, at - tail),
                at if at < self.0.len() as u64 => self.0.as_slice().read_at(buf, at),
                _ => Err(std::io::Error::other("not here")),
            }
        }
        fn size(&self) -> u64 {
            self.2
        }
    }
    // A zfile of a billion blocks: 4 GB of jump table.
    let mut head = samples().sources[2].clone();
    let mut tail = head[head.len() - 512..].to_vec();
    for block in [&mut head, &mut tail] {
        block[40..48].copy_from_slice(&(1u64 << 50).to_le_bytes());
        block[48..56].copy_from_slice(&1_000_000_000u64.to_le_bytes());
        block[56..64].copy_from_slice(&(4096 * 1_000_000_000u64).to_le_bytes());
        mend(block);
    }
    assert!(ZFile::open(Huge(head, tail, 1 << 60)).is_err());
    // A trace of four million records.
    let mut head = samples().sources[6].clone();
    head[8..16].copy_from_slice(&(24u64 * (4 << 20)).to_le_bytes());
    let size = 24 + 24 * (4 << 20);
    assert!(trace::read(&Huge(head, vec![0; 24], size)).is_err());
    // An append upper with an index of a hundred million entries.
    let (data, index) = pair_sample();
    let huge = Huge(index.clone(), vec![0; 16], 100_000_000 * 16);
    assert!(pair::read(Arc::new(data.clone()), &huge, Repair::Cut).is_err());
    check_memory();
}
