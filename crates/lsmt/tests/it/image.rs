//! Whole images against a flat array: everything a disk can go through, in random order.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lsmt::cache::ChainCache;
use lsmt::commit::{self, Elide, Options};
use lsmt::header::Identity;
use lsmt::image::{Image, Opened, Snapshot};
use lsmt::layer::{Layer, LayerKey};
use lsmt::manifest::LayerRef;
use lsmt::source::{FileSource, ReadAt};
use lsmt::stack::Stack;
use lsmt::upper::Durability;
use lsmt::{Error, Result};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::support::*;

const SIZE: u64 = 40 * 4096 + 512;
const LARGEST: u64 = 60 * 4096;

#[derive(Debug, Clone)]
enum Op {
    Write { at: u64, len: u64, fill: u8 },
    Zero { at: u64, len: u64 },
    Flush,
    Freeze,
    Settle { durable: bool },
    Snapshot,
    Fork,
    Reopen,
    Merge { first: usize, count: usize },
    Flatten,
    Resize { sectors: u64 },
    Switch(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Aligned to nothing, to sectors, to blocks.
    let range = (
        0..LARGEST,
        1..30_000u64,
        prop_oneof![Just(1u64), Just(512), Just(4096)],
    )
        .prop_map(|(at, len, align)| (at / align * align, len.next_multiple_of(align)));
    let op = prop_oneof![
        12 => (range.clone(), 1u8..).prop_map(|((at, len), fill)| Op::Write { at, len, fill }),
        4 => range.prop_map(|(at, len)| Op::Zero { at, len }),
        2 => Just(Op::Flush),
        2 => Just(Op::Freeze),
        2 => any::<bool>().prop_map(|durable| Op::Settle { durable }),
        2 => Just(Op::Snapshot),
        1 => Just(Op::Fork),
        2 => Just(Op::Reopen),
        1 => (0usize..8, 1usize..5).prop_map(|(first, count)| Op::Merge { first, count }),
        1 => Just(Op::Flatten),
        1 => (1..=LARGEST / 512).prop_map(|sectors| Op::Resize { sectors }),
        1 => (0usize..4).prop_map(Op::Switch),
    ];
    prop::collection::vec(op, 1..50)
}

/// An image and what it should hold.
struct Disk {
    dir: PathBuf,
    image: Option<Image>,
    expected: Vec<u8>,
}

struct World {
    root: TempDir,
    durability: Durability,
    cache: Arc<ChainCache>,
    disks: Vec<Disk>,
    active: usize,
    snapshots: Vec<(Snapshot, Vec<u8>)>,
    /// Names of layers. A merged layer has the id of the topmost one it replaces, so ids are not enough.
    names: HashMap<LayerKey, String>,
    made: usize,
}

fn resolve(name: &str) -> Result<Arc<Layer>> {
    let mut key = [0; 32];
    let tail = &name.as_bytes()[name.len().saturating_sub(32)..];
    key[..tail.len()].copy_from_slice(tail);
    Ok(Arc::new(Layer::open(
        Arc::new(FileSource::open(name)?),
        LayerKey::from_digest(key),
    )?))
}

/// Opens an image that nobody has open. Tests share a process, and the child that one of them starts holds the locks of
/// all others between its fork and its exec.
fn open(dir: &Path, durability: Durability, cache: Arc<ChainCache>) -> Result<(Image, Opened)> {
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        match Image::open(dir, durability, cache.clone(), &mut resolve) {
            Err(Error::Io { source, .. })
                if source.kind() == ErrorKind::WouldBlock && Instant::now() < limit =>
            {
                std::thread::yield_now();
            }
            result => return result,
        }
    }
}

impl World {
    fn new(durability: Durability) -> World {
        let mut world = World {
            root: tempfile::tempdir_in("/dev/shm")
                .or_else(|_| tempfile::tempdir())
                .unwrap(),
            durability,
            cache: Arc::new(ChainCache::new(2)),
            disks: Vec::new(),
            active: 0,
            snapshots: Vec::new(),
            names: HashMap::new(),
            made: 0,
        };
        world.create(&[], SIZE, vec![0; SIZE as usize]);
        world
    }

    fn create(&mut self, lowers: &[(String, Arc<Layer>)], size: u64, expected: Vec<u8>) {
        let dir = self.root.path().join(format!("image-{}", self.disks.len()));
        std::fs::create_dir(&dir).unwrap();
        let mut image =
            Image::create(&dir, lowers, size, self.durability, self.cache.clone()).unwrap();
        image.set_auto_seal(40);
        self.active = self.disks.len();
        self.disks.push(Disk {
            dir,
            image: Some(image),
            expected,
        });
    }

    fn image(&self) -> &Image {
        self.disks[self.active].image.as_ref().unwrap()
    }

    fn named(&self, layers: &[Arc<Layer>]) -> Vec<(String, Arc<Layer>)> {
        layers
            .iter()
            .map(|layer| (self.names[&layer.key()].clone(), layer.clone()))
            .collect()
    }

    /// Writes some layers as one.
    fn merged(&mut self, layers: &[Arc<Layer>], elide: Elide<'_>) -> (String, Arc<Layer>) {
        let stack = Stack::build(layers.iter().cloned()).unwrap();
        let identity = Identity {
            uuid: layers.last().unwrap().identity().uuid,
            parent: layers[0].identity().parent,
            tag: Vec::new(),
        };
        let path = self.root.path().join(format!("merged-{}.lsmt", self.made));
        self.made += 1;
        let mut out = BufWriter::new(File::create(&path).unwrap());
        let options = Options {
            identity,
            virtual_size: stack.virtual_size(),
            elide,
            ..Options::default()
        };
        commit::flatten(&stack, &options, &mut out).unwrap();
        std::io::Write::flush(&mut out).unwrap();
        let name = path.to_str().unwrap().to_owned();
        let layer = resolve(&name).unwrap();
        (name, layer)
    }

    /// Remembers the names of all layers of a settled image.
    fn note_names(&mut self) {
        let disk = &self.disks[self.active];
        let image = disk.image.as_ref().unwrap();
        for (role, layer) in image.roles().layers.into_iter().zip(image.stack().layers()) {
            let name = match role {
                LayerRef::Lower(name) => name,
                LayerRef::Sealed(uuid) => disk
                    .dir
                    .join(format!("{uuid}.lsmt"))
                    .to_str()
                    .unwrap()
                    .to_owned(),
                LayerRef::Frozen(uuid) => panic!("{uuid} was not settled"),
            };
            self.names.insert(layer.key(), name);
        }
    }

    fn run(&mut self, op: &Op) {
        let size = self.disks[self.active].expected.len() as u64;
        let inside = |at: u64, len: u64| at.min(size)..at.saturating_add(len).min(size);
        match *op {
            Op::Write { at, len, fill } => {
                let range = inside(at, len);
                let data: Vec<u8> = range
                    .clone()
                    .map(|i| fill.wrapping_add((i / 100) as u8))
                    .collect();
                self.image().write(range.start, &data).unwrap();
                self.disks[self.active].expected[range.start as usize..range.end as usize]
                    .copy_from_slice(&data);
            }
            Op::Zero { at, len } => {
                let range = inside(at, len);
                self.image()
                    .zero(range.start, range.end - range.start)
                    .unwrap();
                self.disks[self.active].expected[range.start as usize..range.end as usize].fill(0);
            }
            Op::Flush => self.image().flush().unwrap(),
            Op::Freeze => drop(self.image().freeze().unwrap()),
            Op::Settle { durable } => self.image().settle(durable).unwrap(),
            Op::Snapshot => {
                // Every other one is taken without waiting for the disk, and made durable later.
                let cut = self.snapshots.len() % 2 == 0;
                let snapshot = if cut {
                    self.image().cut().unwrap()
                } else {
                    self.image().snapshot().unwrap()
                };
                assert_eq!(
                    snapshot.stack.layers().last().unwrap().identity().uuid,
                    snapshot.uuid
                );
                snapshot.stack.check_parents().unwrap();
                self.image().settle(true).unwrap();
                self.note_names();
                self.snapshots
                    .push((snapshot, self.disks[self.active].expected.clone()));
            }
            Op::Fork => {
                if let Some((snapshot, expected)) = self
                    .snapshots
                    .last()
                    .cloned()
                    .filter(|_| self.disks.len() < 4)
                {
                    let lowers = self.named(snapshot.stack.layers());
                    self.create(&lowers, 0, expected);
                }
            }
            Op::Reopen => {
                let disk = &mut self.disks[self.active];
                disk.image = None;
                let (mut image, opened) =
                    open(&disk.dir, self.durability, self.cache.clone()).unwrap();
                assert_eq!(opened.manifest_cut, 0);
                assert!(opened.lost.is_empty());
                assert!(opened
                    .uppers
                    .iter()
                    .all(|(_, r)| r.cut == 0 && r.distrusted == 0));
                image.set_auto_seal(40);
                disk.image = Some(image);
            }
            Op::Merge { first, count } => {
                self.image().settle(true).unwrap();
                self.note_names();
                let layers = self.image().stack().layers().to_vec();
                if first + count <= layers.len() {
                    let elide = if first == 0 {
                        Elide::ZerosAtBottom
                    } else {
                        Elide::Zeros
                    };
                    let merged = self.merged(&layers[first..first + count], elide);
                    self.image()
                        .replace_layers(first, count, &[merged])
                        .unwrap();
                }
            }
            Op::Flatten => {
                self.image().settle(true).unwrap();
                self.note_names();
                let layers = self.image().stack().layers().to_vec();
                if !layers.is_empty() {
                    let merged = self.merged(&layers, Elide::Nothing);
                    self.image()
                        .replace_layers(0, layers.len(), &[merged])
                        .unwrap();
                }
            }
            Op::Resize { sectors } => {
                self.image().resize(sectors * 512).unwrap();
                self.disks[self.active]
                    .expected
                    .resize(sectors as usize * 512, 0);
            }
            Op::Switch(to) => self.active = to % self.disks.len(),
        }
    }

    fn check(&self, disk: &Disk) {
        let image = disk.image.as_ref().unwrap();
        assert_eq!(image.virtual_size(), disk.expected.len() as u64);
        let mut found = vec![0xcc; disk.expected.len() + 10];
        let got = image.read(&mut found, 0).unwrap();
        assert_same(&found[..got], &disk.expected, "the image");
    }
}

fn cases() -> u32 {
    std::env::var("LSMT_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_image_is_an_array(ops in ops(), flush: bool) {
        let mut world = World::new(if flush { Durability::Flush } else { Durability::Process });
        for op in &ops {
            world.run(op);
            world.check(&world.disks[world.active]);
        }
        for disk in &world.disks {
            world.check(disk);
        }
        for (snapshot, expected) in &world.snapshots {
            assert_same(&content(&*snapshot.stack), expected, "a snapshot");
        }
    }
}

#[test]
fn files_without_a_role_are_found() {
    let mut world = World::new(Durability::Process);
    for round in 0..3 {
        world.run(&Op::Write {
            at: round * 5000,
            len: 9000,
            fill: round as u8 + 1,
        });
        world.run(&Op::Snapshot);
    }
    assert!(world.image().unreferenced().unwrap().is_empty());
    let dir = world.disks[0].dir.clone();
    let orphan = dir.join("0f0f0f0f-0000-4000-8000-000000000000.jrn");
    std::fs::write(&orphan, "x").unwrap();
    std::fs::write(dir.join("somebody-elses.lsmt"), "x").unwrap();
    assert_eq!(world.image().unreferenced().unwrap(), vec![orphan]);
    world.run(&Op::Merge { first: 0, count: 2 });
    let found = world.image().unreferenced().unwrap();
    assert_eq!(
        found.len(),
        3,
        "two replaced layers and the orphan: {found:?}"
    );
    world.check(&world.disks[0]);
}

#[test]
fn forks_share_the_merged_index() {
    let mut world = World::new(Durability::None);
    for round in 0..5 {
        world.run(&Op::Write {
            at: round * 5000,
            len: 9000,
            fill: round as u8 + 1,
        });
        world.run(&Op::Snapshot);
    }
    world.run(&Op::Fork);
    let first = world.image().stack();
    world.run(&Op::Fork);
    assert!(Arc::ptr_eq(&first, &world.image().stack()));
}

#[test]
fn without_a_journal_a_crash_goes_back_to_the_last_seal() {
    let mut world = World::new(Durability::None);
    world.run(&Op::Write {
        at: 0,
        len: 10_000,
        fill: 1,
    });
    world.run(&Op::Snapshot);
    let expected = world.disks[0].expected.clone();
    world.run(&Op::Write {
        at: 5000,
        len: 10_000,
        fill: 2,
    });
    world.run(&Op::Freeze);
    world.run(&Op::Write {
        at: 9000,
        len: 10_000,
        fill: 3,
    });
    world.disks[0].image = None;
    let (image, opened) = open(&world.disks[0].dir, Durability::None, world.cache.clone()).unwrap();
    assert_eq!(opened.lost.len(), 2);
    world.disks[0].image = Some(image);
    world.disks[0].expected = expected;
    world.check(&world.disks[0]);
    // And again: what was lost is not lost twice.
    world.disks[0].image = None;
    let (_, opened) = open(&world.disks[0].dir, Durability::None, world.cache.clone()).unwrap();
    assert_eq!(
        opened.lost.len(),
        1,
        "the empty upper that was made in its place"
    );
}

#[test]
fn an_upper_is_sealed_before_its_index_is_too_long() {
    let mut world = World::new(Durability::Process);
    for i in 0..30 {
        // Every other block, backwards: nothing can be joined.
        world.run(&Op::Write {
            at: (38 - 2 * (i % 19)) * 4096,
            len: 4096,
            fill: i as u8 + 1,
        });
        world.run(&Op::Zero {
            at: (38 - 2 * (i % 19)) * 4096 + 512,
            len: 3000,
        });
    }
    let mut image = world.disks[0].image.take().unwrap();
    image.set_auto_seal(3);
    world.disks[0].image = Some(image);
    for i in 0..40 {
        world.run(&Op::Write {
            at: (i % 20) * 8192,
            len: 4096,
            fill: i as u8 + 1,
        });
        world.check(&world.disks[0]);
    }
    let image = world.image();
    assert!(
        image.unsettled() <= 4,
        "writers settle when nobody else does"
    );
    assert!(image.stack().layers().len() >= 8);
    image.settle(true).unwrap();
    assert_eq!(image.unsettled(), 0);
    world.check(&world.disks[0]);
}

#[test]
fn readers_and_writers_go_on_through_snapshots() {
    let world = World::new(Durability::Process);
    let image = world.image();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each writer owns one sector of every block, and what it reads back is what it wrote last.
        for writer in 0..3u64 {
            let stop = &stop;
            scope.spawn(move || {
                let mut round = 0u8;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    for block in 0..8 {
                        let at = block * 4096 + writer * 512;
                        image.write(at, &[round; 512]).unwrap();
                        let mut back = [0; 512];
                        image.read(&mut back, at).unwrap();
                        assert!(
                            back == [round; 512],
                            "writer {writer}, block {block}, round {round}"
                        );
                    }
                }
            });
        }
        let mut snapshots = Vec::new();
        for _ in 0..12 {
            let snapshot = image.snapshot().unwrap();
            let frozen = content(&*snapshot.stack);
            snapshots.push((snapshot, frozen));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for (snapshot, frozen) in &snapshots {
            assert_same(
                &content(&*snapshot.stack),
                frozen,
                "a snapshot never changes",
            );
        }
    });
    assert_eq!(image.stack().layers().len(), 12);
}

#[test]
fn a_manifest_cut_anywhere_leaves_a_readable_image() {
    // The states of the disk at each snapshot; a manifest that ends earlier shows an earlier one or the live upper.
    let mut world = World::new(Durability::Process);
    let dir = world.disks[0].dir.clone();
    let mut lengths = Vec::new();
    for round in 0..4u64 {
        world.run(&Op::Write {
            at: round * 3000,
            len: 9000,
            fill: round as u8 + 1,
        });
        world.run(&Op::Snapshot);
        lengths.push(std::fs::metadata(dir.join("manifest")).unwrap().len());
    }
    world.disks[0].image = None;
    let whole = std::fs::read(dir.join("manifest")).unwrap();
    for cut in lengths[0] as usize..=whole.len() {
        std::fs::write(dir.join("manifest"), &whole[..cut]).unwrap();
        match open(&dir, Durability::Process, world.cache.clone()) {
            Ok((image, _)) => {
                let whole_snapshots = lengths.iter().filter(|l| **l <= cut as u64).count();
                assert!(
                    image.stack().layers().len() >= whole_snapshots,
                    "{cut} bytes"
                );
            }
            // Between the freeze and the record of the seal the journal is needed, and gone after a seal that is on record.
            Err(Error::Io { source, .. }) => {
                assert_eq!(source.kind(), std::io::ErrorKind::NotFound)
            }
            Err(error) => panic!("{cut} bytes: {error}"),
        }
        // Opening cut the torn record off and changed nothing else.
        let left = std::fs::read(dir.join("manifest")).unwrap();
        assert!(whole.starts_with(&left));
    }
    std::fs::write(dir.join("manifest"), &whole[..40]).unwrap();
    assert!(matches!(
        open(&dir, Durability::Process, world.cache.clone()),
        Err(Error::Format { .. })
    ));
}

#[test]
fn lower_layers_larger_than_the_disk_stay_hidden() {
    let lower = resolve(path("lsmt/s0-base.commit").to_str().unwrap()).unwrap();
    let name = path("lsmt/s0-base.commit").to_str().unwrap().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let cache = Arc::new(ChainCache::new(0));
    let image = Image::create(dir.path(), &[(name, lower)], 0, Durability::None, cache).unwrap();
    let mut expected = content(&stack(&["lsmt/s0-base.commit"]));
    let size = expected.len();
    assert!(expected[300 * 512 + 100] != 0);
    image.resize(300 * 512).unwrap();
    image.snapshot().unwrap();
    image.resize(size as u64).unwrap();
    expected[300 * 512..].fill(0);
    let mut found = vec![1; size];
    assert_eq!(image.read(&mut found, 0).unwrap(), size);
    assert_same(&found, &expected, "a disk that shrank and grew");
    let snapshot = image.snapshot().unwrap();
    assert_same(&content(&*snapshot.stack), &expected, "and its snapshot");
    assert_eq!(snapshot.stack.size(), size as u64);
}

/// Blocks the child of the next test writes to, and how often it cuts.
const BLOCKS: u64 = 64;
const CUT_EVERY: u64 = 40;

fn stamp(op: u64) -> Vec<u8> {
    (op + 1).to_le_bytes().repeat(512)
}

/// Writes one block after the other and says so, while another thread turns cuts into layers, until it is killed.
fn write_until_killed(dir: &std::path::Path) -> ! {
    use std::io::Write;
    let cache = Arc::new(ChainCache::new(0));
    let image = Image::create(dir, &[], BLOCKS * 4096, Durability::Process, cache).unwrap();
    let (cuts, settle) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let image = &image;
        scope.spawn(move || settle.iter().for_each(|()| image.settle(true).unwrap()));
        for op in 0.. {
            image.write(op * 7 % BLOCKS * 4096, &stamp(op)).unwrap();
            // The pipe is read by the test: what is in it was acknowledged.
            std::io::stderr().write_all(&op.to_le_bytes()).unwrap();
            if op % CUT_EVERY == CUT_EVERY - 1 {
                image.freeze().unwrap();
                cuts.send(()).unwrap();
            }
        }
    });
    unreachable!("the loop has no end");
}

#[test]
fn a_killed_process_loses_no_acknowledged_write() {
    use std::io::Read;
    use std::process::{Command, Stdio};
    if let Some(dir) = std::env::var_os("LSMT_KILLED_IN") {
        write_until_killed(std::path::Path::new(&dir));
    }
    for round in 0..12u64 {
        let dir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                "image::a_killed_process_loses_no_acknowledged_write",
            ])
            .env("LSMT_KILLED_IN", dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pipe = child.stderr.take().unwrap();
        let mut acknowledged = vec![0; 8 * (CUT_EVERY * round + 17 * round + 1) as usize];
        pipe.read_exact(&mut acknowledged).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        pipe.read_to_end(&mut acknowledged).unwrap();
        let last = u64::from_le_bytes(
            acknowledged[acknowledged.len() / 8 * 8 - 8..][..8]
                .try_into()
                .unwrap(),
        );
        assert_eq!(
            last + 1,
            acknowledged.len() as u64 / 8,
            "the pipe holds acknowledgements and nothing else"
        );

        let cache = Arc::new(ChainCache::new(0));
        let (image, opened) = open(dir.path(), Durability::Process, cache).unwrap();
        image.settle(true).unwrap();
        for orphan in image.unreferenced().unwrap() {
            std::fs::remove_file(orphan).unwrap();
        }
        for block in 0..BLOCKS {
            let mut found = vec![0; 4096];
            image.read(&mut found, block * 4096).unwrap();
            let of_block = |op: &u64| op * 7 % BLOCKS == block;
            let expected = (0..=last).rev().find(of_block).map_or(vec![0; 4096], stamp);
            // The write that was under way may have arrived as well.
            let next = stamp(last + 1);
            let arrived = of_block(&(last + 1)) && found == next;
            assert!(
                found == expected || arrived,
                "round {round}, block {block} after {last}, {opened:?}"
            );
        }
    }
}
