//! Micro-benchmarks of the engine. Each line: what, N, min, p50, p95, p99, max, and a rate or size.
//!
//! `cargo run --release --example bench -p lsmt [DIR [PART]]` writes temporary files to DIR (default: the temporary directory of
//! the system). Everything is measured warm, in one process; device flushes are not part of any figure unless named.

use std::fmt::Display;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lsmt::cache::ChainCache;
use lsmt::commit::{self, Options};
use lsmt::entry::Entry;
use lsmt::header::Identity;
use lsmt::image::Image;
use lsmt::index::Index;
use lsmt::layer::{Layer, LayerKey};
use lsmt::merge;
use lsmt::source::{FileSource, ReadAt};
use lsmt::stack::Stack;
use lsmt::upper::{self, Durability, Upper};
use lsmt::zfile::{self, Algorithm, ZFile, ZWriter};

/// xorshift64: the same sequence in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

fn report(what: &str, mut times: Vec<Duration>, note: impl Display) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    println!(
        "{what:<44} N={:<8} min={:<10} p50={:<10} p95={:<10} p99={:<10} max={:<10} {note}",
        times.len(),
        show(times[0]),
        show(at(50)),
        show(at(95)),
        show(at(99)),
        show(times[times.len() - 1])
    );
}

fn show(time: Duration) -> String {
    match time.as_nanos() {
        n if n < 10_000 => format!("{n} ns"),
        n if n < 10_000_000 => format!("{:.1} µs", n as f64 / 1e3),
        n => format!("{:.1} ms", n as f64 / 1e6),
    }
}

/// Times long steps by the processor time of this thread if `LSMT_BENCH_CLOCK=cpu` (for machines with other work), by the
/// wall clock otherwise.
fn now() -> Duration {
    static START: OnceLock<Option<Instant>> = OnceLock::new();
    let wall = START.get_or_init(|| {
        let cpu = std::env::var("LSMT_BENCH_CLOCK").is_ok_and(|clock| clock == "cpu");
        (!cpu).then(Instant::now)
    });
    match wall {
        Some(start) => start.elapsed(),
        None => {
            let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
            Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
        }
    }
}

fn measure<T>(times: usize, mut run: impl FnMut() -> T) -> (Vec<Duration>, T) {
    let mut all = Vec::new();
    loop {
        let start = now();
        let result = black_box(run());
        all.push(now() - start);
        if all.len() == times {
            return (all, result);
        }
    }
}

/// `count` entries of one block each at random blocks of `blocks`.
fn scattered(count: usize, blocks: u64, seed: u64) -> Index {
    let mut random = Random(seed);
    let mut set = std::collections::BTreeSet::new();
    while set.len() < count {
        set.insert(random.below(blocks));
    }
    // Never joined: the source order is scrambled.
    Index::new(
        set.iter()
            .enumerate()
            .map(|(i, b)| Entry::data(b * 8, 8, 8 + (i as u64 ^ 1) * 8, 0))
            .collect(),
    )
    .unwrap()
}

fn layer(index: Index) -> Arc<Layer> {
    let size = 1 << 40;
    Arc::new(Layer::new(Identity::default(), size, index, vec![Arc::new(Vec::new())]).unwrap())
}

fn lookups(_: &Path) {
    for count in [262_144usize, 1_000_000] {
        let blocks = 16 << 20;
        let index = scattered(count, blocks, 7);
        let mut random = Random(99);
        let sectors: Vec<u64> = (0..1_000_000).map(|_| random.below(blocks * 8)).collect();
        // One lookup is shorter than reading the clock: time a thousand at once.
        let mut found = 0u64;
        let times: Vec<_> = sectors
            .chunks(1000)
            .map(|chunk| {
                let start = Instant::now();
                for sector in chunk {
                    found += u64::from(index.get(*sector).is_some());
                }
                start.elapsed() / 1000
            })
            .collect();
        black_box(found);
        report(
            &format!("lookup, {count} entries"),
            times,
            format!("{} bytes", index.memory()),
        );
    }
    for depth in [2u64, 8, 32] {
        let mut pushed = Stack::default();
        for i in 0..depth {
            pushed = pushed
                .push(layer(scattered(50_000, 16 << 20, 100 + i)))
                .unwrap();
        }
        for (name, stack) in [
            ("unmerged", pushed.clone()),
            ("levelled", pushed.levelled().unwrap()),
        ] {
            let mut random = Random(5);
            let mut pieces = 0u64;
            let times: Vec<_> = (0..300)
                .map(|_| {
                    let sectors: Vec<u64> = (0..1000).map(|_| random.below(16 << 20) * 8).collect();
                    let start = Instant::now();
                    for sector in sectors {
                        stack
                            .pieces(sector..sector + 8, &mut |piece| {
                                pieces += piece.len;
                                Ok::<_, ()>(())
                            })
                            .unwrap();
                    }
                    start.elapsed() / 1000
                })
                .collect();
            black_box(pieces);
            report(
                &format!("lookup, chain of {depth} × 50k, {name}"),
                times,
                format!("runs {:?}", stack.run_lengths().len()),
            );
        }
    }
}

fn merges(_: &Path) {
    for (layers, entries) in [(8, 50_000), (32, 50_000), (255, 10_000)] {
        let indexes: Vec<_> = (0..layers)
            .map(|i| scattered(entries, 16 << 20, 1 + i))
            .collect();
        let parts: Vec<_> = indexes
            .iter()
            .enumerate()
            .map(|(i, index)| (index, (layers - 1) as u8 - i as u8))
            .collect();
        let (times, merged) = measure(10, || merge::merge_all(&parts).unwrap());
        report(
            &format!("merge {layers} × {entries}"),
            times,
            format!("{} entries out", merged.len()),
        );
    }
    let base = scattered(970_000, 16 << 20, 3);
    let small = scattered(5000, 16 << 20, 4);
    let (times, _) = measure(30, || merge::merge(&small, 1, &base).unwrap());
    report("merge 5k into 970k", times, "");
    let stack = Stack::build([layer(base)]).unwrap();
    let top = layer(small);
    let (times, _) = measure(1000, || {
        stack.push(top.clone()).unwrap().levelled().unwrap()
    });
    report("push 5k onto 970k, levelled", times, "no merge needed");
}

fn uppers(dir: &Path) {
    let blocks = 2 << 20;
    for durability in [Durability::None, Durability::Process] {
        let path = dir.join(format!("bench-{durability:?}.lsmt"));
        let options = upper::Options {
            identity: Identity::random(Default::default()),
            virtual_size: blocks * 4096,
            durability,
        };
        let upper = Upper::create(&path, &options).unwrap();
        let (mut random, data, below) = (Random(11), vec![0x5a; 4096], Vec::new());
        let times: Vec<_> = (0..262_144)
            .map(|_| {
                let at = random.below(blocks) * 4096;
                let start = Instant::now();
                upper.write(at, &data, &below).unwrap();
                start.elapsed()
            })
            .collect();
        report(
            &format!("upper write 4 KiB random, {durability:?}"),
            times,
            "",
        );
        let mut buf = vec![0; 4096];
        let times: Vec<_> = (0..200_000)
            .map(|_| {
                let at = random.below(blocks) * 4096;
                let start = Instant::now();
                upper.read(&mut buf, at, &below).unwrap();
                start.elapsed()
            })
            .collect();
        report(
            &format!("upper read 4 KiB random, {durability:?}"),
            times,
            "",
        );
        let entries = upper.entries();
        let (times, _) = measure(1, || upper.freeze());
        report("freeze", times, format!("{entries} entries"));
        let (times, _) = measure(5, || upper.layer().unwrap());
        report("frozen index", times, format!("{entries} entries"));
        let (times, sealed) = measure(1, || upper.seal(false).unwrap());
        report(
            "seal, not flushed",
            times,
            format!("{} entries, {} bytes", sealed.entries, sealed.file),
        );
        drop(upper);
        let (times, _) = measure(10, || {
            Layer::open(
                Arc::new(FileSource::open(&path).unwrap()),
                LayerKey::unique(),
            )
            .unwrap()
        });
        report("open sealed layer", times, "");
        std::fs::remove_file(&path).unwrap();
        let _ = std::fs::remove_file(path.with_extension("jrn"));
    }
}

fn snapshots(dir: &Path) {
    let dir = dir.join("bench-image");
    std::fs::create_dir(&dir).unwrap();
    let image = Image::create(
        &dir,
        &[],
        8 << 30,
        Durability::Process,
        Arc::new(ChainCache::new(0)),
    )
    .unwrap();
    let mut random = Random(21);
    let (mut freezes, mut settles) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        for _ in 0..5000 {
            image
                .write(random.below(2 << 20) * 4096, &[7; 4096])
                .unwrap();
        }
        let start = Instant::now();
        image.freeze().unwrap();
        freezes.push(start.elapsed());
        let start = Instant::now();
        image.settle(true).unwrap();
        settles.push(start.elapsed());
    }
    report(
        "image freeze (guest continues after)",
        freezes,
        "5000 blocks each, 40 snapshots deep",
    );
    report(
        "image settle (index, seal, flush, record)",
        settles,
        format!("runs {:?}", image.stack().run_lengths()),
    );
    drop(image);
    std::fs::remove_dir_all(&dir).unwrap();
}

fn zfiles(dir: &Path) {
    // Half text-like, a quarter random, a quarter zero.
    let mut random = Random(31);
    let mut plain = Vec::with_capacity(256 << 20);
    while plain.len() < 256 << 20 {
        match random.below(4) {
            0 => plain.extend((0..512).flat_map(|_| random.next().to_le_bytes())),
            1 => plain.extend_from_slice(&[0; 4096]),
            _ => plain.extend(
                (0..1024).flat_map(|_| (random.below(64) as u32 * 0x0101_0000).to_le_bytes()),
            ),
        }
    }
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for workers in [0, 2] {
            let options = zfile::Options {
                algorithm,
                workers,
                block_size: 4096,
                verify: true,
            };
            let path = dir.join("bench.zf");
            let (times, size) = measure(3, || {
                let mut writer = ZWriter::new(File::create(&path).unwrap(), options).unwrap();
                writer.write_all(&plain).unwrap();
                writer.finish_seekable().unwrap().1
            });
            let best = times.iter().min().unwrap().as_secs_f64();
            let note = format!(
                "{:.0} MB/s, ratio {:.2}",
                268.4 / best,
                plain.len() as f64 / size as f64
            );
            report(
                &format!("zfile build 256 MiB, {algorithm:?}, {workers} workers"),
                times,
                note,
            );
        }
        let zfile = ZFile::open(FileSource::open(dir.join("bench.zf")).unwrap()).unwrap();
        let mut buf = vec![0; 4096];
        let times: Vec<_> = (0..50_000)
            .map(|_| {
                let at = random.below(65_536) * 4096;
                let start = Instant::now();
                zfile.read_exact_at(&mut buf, at).unwrap();
                start.elapsed()
            })
            .collect();
        report(
            &format!("zfile read 4 KiB random, {algorithm:?}"),
            times,
            format!("{} bytes of jump table", zfile.memory()),
        );
        let mut buf = vec![0; 1 << 20];
        let (times, ()) = measure(1, || {
            (0..256).for_each(|i| zfile.read_exact_at(&mut buf, i << 20).unwrap())
        });
        let rate = 268.4 / times[0].as_secs_f64();
        report(
            &format!("zfile read 256 MiB in sequence, {algorithm:?}"),
            times,
            format!("{rate:.0} MB/s"),
        );
    }
    std::fs::remove_file(dir.join("bench.zf")).unwrap();
}

fn commits(dir: &Path) {
    let data: Arc<dyn ReadAt> = Arc::new(vec![0x33; 256 << 20]);
    let scattered = Index::new(
        (0..60_000)
            .map(|i| Entry::data(i * 16, 8, (i * 7919 % 60_000) * 8, 0))
            .collect(),
    )
    .unwrap();
    let path = dir.join("bench.lsmt");
    for (name, elide) in [
        ("", commit::Elide::Nothing),
        (", zeros elided", commit::Elide::Zeros),
    ] {
        let options = Options {
            virtual_size: 1 << 40,
            elide,
            ..Options::default()
        };
        let (times, written) = measure(5, || {
            let mut out = File::create(&path).unwrap();
            commit::commit(&scattered, std::slice::from_ref(&data), &options, &mut out).unwrap()
        });
        let rate = written.data as f64 / 1e6 / times.iter().min().unwrap().as_secs_f64();
        report(
            &format!("commit 60k scattered blocks{name}"),
            times,
            format!("{rate:.0} MB/s"),
        );
    }
    std::fs::remove_file(&path).unwrap();
}

/// A group of benchmarks and its name.
type Part = (&'static str, fn(&Path));

const PARTS: [Part; 6] = [
    ("lookups", lookups),
    ("merges", merges),
    ("uppers", uppers),
    ("snapshots", snapshots),
    ("commits", commits),
    ("zfiles", zfiles),
];

fn main() {
    let dir = std::env::args()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = dir.join(format!("lsmt-bench-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let threads = std::thread::available_parallelism().map_or(0, |n| n.get());
    println!("{threads} processors, files in {}", dir.display());
    let only = std::env::args().nth(2);
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    for (name, run) in PARTS {
        if wanted(name) {
            run(&dir);
        }
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
