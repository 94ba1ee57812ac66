//! Crashes of uppers: journals cut and corrupted everywhere, machines that restart, files that must not grow.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use uuid::Uuid;

use super::journal::{boot_id, Head};
use super::*;
use crate::layer::LayerKey;
use crate::source::ReadAt;
use crate::stack::Stack;

const SIZE: usize = 64 * 4096;

/// A directory in memory where the system has one: these tests recover thousands of times.
fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn options(durability: Durability) -> Options {
    Options {
        identity: Identity::random(Uuid::nil()),
        virtual_size: SIZE as u64,
        durability,
    }
}

/// A lower disk that is nowhere zero, shorter than the upper.
fn lower() -> Vec<u8> {
    (0..SIZE - 5000)
        .map(|i| (i / 512 % 250) as u8 + 1)
        .collect()
}

fn content(upper: &Upper, below: &dyn ReadAt) -> Vec<u8> {
    let mut all = vec![0xee; upper.virtual_size() as usize];
    upper.read(&mut all, 0, below).unwrap();
    all
}

/// A change to a disk, applied to an upper and to an array.
#[derive(Debug, Clone, Copy)]
enum Step {
    Write(usize, usize, u8),
    Zero(usize, usize),
    Flush,
}
use Step::*;

fn apply(step: Step, upper: &Upper, below: &dyn ReadAt, disk: &mut [u8]) {
    match step {
        Write(at, len, fill) => {
            upper.write(at as u64, &vec![fill; len], below).unwrap();
            disk[at..at + len].fill(fill);
        }
        Zero(at, len) => {
            upper.zero(at as u64, len as u64, below).unwrap();
            disk[at..at + len].fill(0);
        }
        Flush => upper.flush().unwrap(),
    }
}

/// Steps that overlap in every way; each changes the index by one record.
const STEPS: [Step; 14] = [
    Write(0, 4096 * 4, 1),
    Write(8192, 4096, 2),
    Write(100, 1000, 3),
    Flush,
    Zero(4096, 8192),
    Write(4096 * 10, 4096 * 20, 4),
    Write(4096 * 12 + 512, 4096 * 3, 5),
    Flush,
    Write(4096 * 12, 4096 * 8, 6),
    Write(0, 4096 * 4, 7),
    Zero(4096 * 40, 4096 * 10),
    Write(4096 * 45 + 1, 4094, 8),
    Write(SIZE - 300, 300, 9),
    Write(0, 4096, 10),
];

struct Run {
    dir: TempDir,
    path: PathBuf,
    /// The disk after each number of records.
    disks: Vec<Vec<u8>>,
    /// Length of the journal and content of the data file after each step.
    steps: Vec<(usize, Vec<u8>)>,
    /// Records that were flushed, and the data file at each flush.
    flushed: Vec<(usize, Vec<u8>)>,
    identity: Identity,
}

/// Plays the steps and closes the upper without any ceremony.
fn play(durability: Durability) -> Run {
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    let below = lower();
    let mut disk = below.clone();
    disk.resize(SIZE, 0);
    let upper = Upper::create(&path, &options(durability)).unwrap();
    let mut disks = vec![disk.clone()];
    let mut flushed = Vec::new();
    let mut steps = Vec::new();
    for step in STEPS {
        apply(step, &upper, &below, &mut disk);
        match step {
            Flush => flushed.push((disks.len() - 1, fs::read(&path).unwrap())),
            _ => disks.push(disk.clone()),
        }
        let journal = fs::metadata(path.with_extension("jrn")).unwrap().len() as usize;
        steps.push((journal, fs::read(&path).unwrap()));
        assert!(content(&upper, &below) == disk, "after {step:?}");
    }
    Run {
        dir,
        path,
        disks,
        steps,
        flushed,
        identity: upper.identity().clone(),
    }
}

impl Run {
    /// The data file as it is when the journal ends before byte `end`: the step whose record that is has stored its data.
    fn data(&self, end: usize) -> &[u8] {
        let step = self.steps.iter().find(|(journal, _)| *journal > end);
        &step.or(self.steps.last()).expect("at least one step").1
    }
}

/// Recovers an upper from the given files and returns its disk.
fn recover(dir: &Path, data: &[u8], journal: &[u8]) -> Result<(Vec<u8>, Recovery)> {
    let path = dir.join("copy.lsmt");
    fs::write(&path, data).unwrap();
    fs::write(path.with_extension("jrn"), journal).unwrap();
    // What is believed depends on the journal, not on how the upper is used from now on; this is the fast way.
    let (upper, recovery) = Upper::open(&path, Durability::Process)?;
    Ok((content(&upper, &lower()), recovery))
}

#[test]
fn a_journal_cut_anywhere_gives_the_disk_at_that_record() {
    for durability in [Durability::Process, Durability::Flush] {
        let run = play(durability);
        let journal = fs::read(run.path.with_extension("jrn")).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for cut in 64..=journal.len() {
            let (disk, recovery) = recover(run.dir.path(), run.data(cut), &journal[..cut]).unwrap();
            assert!(!recovery.machine_restarted);
            assert!(
                disk == run.disks[recovery.records as usize],
                "{cut} bytes of journal, {recovery:?}"
            );
            seen.insert(recovery.records);
        }
        assert_eq!(seen.len(), run.disks.len(), "every state was reached");
        for cut in 0..64 {
            assert!(recover(run.dir.path(), run.data(cut), &journal[..cut]).is_err());
        }
    }
}

#[test]
fn a_journal_damaged_anywhere_gives_the_disk_before_the_damage() {
    let run = play(Durability::Flush);
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let mut last = 0;
    for at in 64..journal.len() {
        let mut damaged = journal.clone();
        damaged[at] ^= 0x10;
        let (disk, recovery) = recover(run.dir.path(), run.data(at), &damaged).unwrap();
        assert!(
            disk == run.disks[recovery.records as usize],
            "damage at {at}"
        );
        assert!(recovery.records >= last && recovery.cut > 0);
        last = recovery.records;
    }
}

/// The journal as a machine would find it that was started again.
fn restarted(journal: &[u8], key: u64, identity: &Identity) -> Vec<u8> {
    let head = Head {
        upper: identity.uuid,
        key,
        boot: Uuid::from_u128(1),
        virtual_size: SIZE as u64,
    };
    [&head.encode()[..], &journal[64..]].concat()
}

#[test]
fn after_a_restart_of_the_machine_only_what_was_flushed_counts() {
    let run = play(Durability::Flush);
    let data = fs::read(&run.path).unwrap();
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let key = u64::from_le_bytes(journal[24..32].try_into().unwrap());
    let journal = restarted(&journal, key, &run.identity);
    let (records, data_at_flush) = run.flushed.last().unwrap();
    // Whether the data written after the flush reached the disk or not makes no difference: nothing flushed was overwritten.
    for data in [&data, data_at_flush] {
        let (disk, recovery) = recover(run.dir.path(), data, &journal).unwrap();
        assert!(recovery.machine_restarted);
        assert_eq!(
            (recovery.records, recovery.distrusted),
            (*records as u64, (run.disks.len() - 1 - records) as u64)
        );
        assert!(disk == run.disks[*records]);
    }
    // The journal itself may have been lost at any point after the flush.
    for (records, data) in &run.flushed {
        let mut reached = false;
        for cut in 64..=journal.len() {
            let Ok((disk, recovery)) = recover(run.dir.path(), data, &journal[..cut]) else {
                continue; // A later barrier survived, which the system does not allow without its data.
            };
            if recovery.records == *records as u64 {
                reached = true;
                assert!(disk == run.disks[*records]);
            }
        }
        assert!(reached);
    }
}

#[test]
fn without_flushes_a_restart_of_the_machine_takes_everything_back_to_the_last_seal() {
    let run = play(Durability::Process);
    let data = fs::read(&run.path).unwrap();
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let key = u64::from_le_bytes(journal[24..32].try_into().unwrap());
    let journal = restarted(&journal, key, &run.identity);
    let (disk, recovery) = recover(run.dir.path(), &data, &journal).unwrap();
    assert_eq!(
        (recovery.records, recovery.distrusted),
        (0, run.disks.len() as u64 - 1)
    );
    assert!(disk == run.disks[0]);
}

#[test]
fn records_of_another_journal_do_not_fit() {
    let run = play(Durability::Process);
    let data = fs::read(&run.path).unwrap();
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let other = Head {
        key: 77,
        boot: boot_id(),
        upper: run.identity.uuid,
        virtual_size: SIZE as u64,
    };
    let transplanted = [&other.encode()[..], &journal[64..]].concat();
    let (disk, recovery) = recover(run.dir.path(), &data, &transplanted).unwrap();
    assert_eq!(recovery.records, 0);
    assert!(disk == run.disks[0]);
    let stranger = Head {
        upper: Uuid::from_u128(9),
        ..other
    };
    let error = recover(run.dir.path(), &data, &stranger.encode()).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");
}

#[test]
fn a_data_file_shorter_than_the_journal_says_is_an_error() {
    let run = play(Durability::Process);
    let data = fs::read(&run.path).unwrap();
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let error = recover(run.dir.path(), &data[..data.len() / 2], &journal).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");
}

#[test]
fn an_open_upper_cannot_be_opened_again() {
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    let upper = Upper::create(&path, &options(Durability::Process)).unwrap();
    let error = Upper::open(&path, Durability::Process).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    drop(upper);
    Upper::open(&path, Durability::Process).unwrap();
}

#[test]
fn a_seal_cut_anywhere_can_be_repeated() {
    let run = play(Durability::Process);
    let below = lower();
    let journal = fs::read(run.path.with_extension("jrn")).unwrap();
    let sealed_path = run.dir.path().join("sealed.lsmt");
    fs::copy(&run.path, &sealed_path).unwrap();
    fs::copy(
        run.path.with_extension("jrn"),
        sealed_path.with_extension("jrn"),
    )
    .unwrap();
    let (upper, _) = Upper::open(&sealed_path, Durability::Process).unwrap();
    upper.freeze();
    let sealed = upper.seal(true).unwrap();
    assert_eq!(upper.seal(false).unwrap(), sealed);
    drop(upper);
    let whole = fs::read(&sealed_path).unwrap();
    assert_eq!(whole.len() as u64, sealed.file);
    let start = fs::metadata(&run.path).unwrap().len() as usize;
    for cut in (start - 4096..=whole.len())
        .step_by(511)
        .chain([start, whole.len()])
    {
        let path = run.dir.path().join("again.lsmt");
        fs::write(&path, &whole[..cut.max(start)]).unwrap();
        fs::write(path.with_extension("jrn"), &journal).unwrap();
        let (upper, _) = Upper::open(&path, Durability::Process).unwrap();
        upper.freeze();
        upper.seal(true).unwrap();
        upper.remove_journal().unwrap();
        drop(upper);
        assert!(fs::read(&path).unwrap() == whole, "cut at {cut}");
        let layer = Layer::open(Arc::new(whole.clone()), LayerKey::unique()).unwrap();
        let mut disk = vec![0; SIZE];
        // The lower disk as a layer below.
        let base = crate::index::Index::new(vec![Entry::data(0, (below.len() / 512) as u64, 0, 0)])
            .unwrap();
        let short = below[..below.len() / 512 * 512].to_vec();
        let base = Layer::new(
            Identity::default(),
            SIZE as u64,
            base,
            vec![Arc::new(short)],
        )
        .unwrap();
        Stack::build([Arc::new(base), Arc::new(layer)])
            .unwrap()
            .read_exact_at(&mut disk, 0)
            .unwrap();
        let same = (0..SIZE)
            .filter(|i| i / 512 != below.len() / 512)
            .all(|i| disk[i] == run.disks.last().unwrap()[i]);
        assert!(same);
    }
}

#[test]
fn what_a_guest_writes_cannot_pass_for_a_seal() {
    // The last block of the file is a perfect trailer, written by the guest, whose index shows other blocks.
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    let upper = Upper::create(&path, &options(Durability::Process)).unwrap();
    upper.write(0, &[1; 4096], &Vec::new()).unwrap();
    let header = Header::new(
        flags::HEADER | flags::DATA,
        SIZE as u64,
        upper.identity().clone(),
    );
    let mut forged = Vec::new();
    tail::write(
        &[Entry::data(0, 8, 8, 0)],
        8192,
        &header,
        Padding::Page,
        &mut forged,
    )
    .unwrap();
    upper.write(8192, &forged, &Vec::new()).unwrap();
    let before = content(&upper, &Vec::new());
    drop(upper);
    assert!(
        Layer::open(
            Arc::new(FileSource::open(&path).unwrap()),
            LayerKey::unique()
        )
        .is_ok(),
        "it does look sealed"
    );
    let (upper, _) = Upper::open(&path, Durability::Process).unwrap();
    assert!(content(&upper, &Vec::new()) == before);
}

#[test]
fn rewriting_does_not_make_the_file_grow() {
    let dir = scratch();
    const DISK: usize = 40 << 20;
    for durability in [Durability::None, Durability::Process, Durability::Flush] {
        let path = dir.path().join(format!("{durability:?}.lsmt"));
        let options = Options {
            virtual_size: DISK as u64,
            ..options(durability)
        };
        let upper = Upper::create(&path, &options).unwrap();
        for round in 0..10u8 {
            // Different request sizes each time, so that free space is in pieces.
            let step = [1 << 20, 4096, 64 << 10, 4 << 20][usize::from(round) % 4];
            let data = vec![round + 1; step];
            for at in (0..DISK).step_by(step) {
                upper.write(at as u64, &data, &Vec::new()).unwrap();
            }
        }
        let (live, used) = upper.usage();
        assert_eq!(live, DISK as u64);
        // Live data, a quarter of slack, and what a flush has to wait for.
        let bound = DISK as u64 * 5 / 4
            + (16 << 20)
            + if durability == Durability::Flush {
                68 << 20
            } else {
                4 << 20
            };
        let file = fs::metadata(&path).unwrap().len();
        assert!(
            used <= bound && file <= bound,
            "{durability:?}: {file} bytes, {used} used"
        );
        if let Ok(journal) = fs::metadata(path.with_extension("jrn")) {
            assert!(
                journal.len() < 8 << 20,
                "{} bytes of journal",
                journal.len()
            );
        }
        assert!(content(&upper, &Vec::new()).iter().all(|b| *b == 10));
        drop(upper);
        if durability != Durability::None {
            let (upper, _) = Upper::open(&path, durability).unwrap();
            assert!(content(&upper, &Vec::new()).iter().all(|b| *b == 10));
        }
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn parts_of_a_block_written_at_once_all_arrive() {
    let dir = scratch();
    let upper = Upper::create(&dir.path().join("u.lsmt"), &options(Durability::Process)).unwrap();
    let below = lower();
    std::thread::scope(|scope| {
        for sector in 0..8usize {
            let (upper, below) = (&upper, &below);
            scope.spawn(move || {
                for round in 1..=200u8 {
                    upper
                        .write((4096 * 3 + sector * 512) as u64, &[round; 512], below)
                        .unwrap();
                    let mut back = [0; 512];
                    upper
                        .read(&mut back, (4096 * 3 + sector * 512) as u64, below)
                        .unwrap();
                    assert!(back == [round; 512], "sector {sector}, round {round}");
                }
            });
        }
    });
    assert!(content(&upper, &below)[4096 * 3..4096 * 4]
        .iter()
        .all(|b| *b == 200));
}

#[test]
fn readers_never_see_a_block_that_was_used_again() {
    // Writers stamp whole blocks with one value; a reader that finds two values in a block read a reused one.
    let dir = scratch();
    let upper = Upper::create(&dir.path().join("u.lsmt"), &options(Durability::None)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..2u64 {
            let (upper, stop) = (&upper, &stop);
            scope.spawn(move || {
                for round in 0..4000u64 {
                    let block = (round * 7 + writer * 3) % 8;
                    let stamp = (block << 56 | writer << 48 | round)
                        .to_le_bytes()
                        .repeat(512);
                    upper.write(block * 4096, &stamp, &Vec::new()).unwrap();
                }
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
        let (upper, stop) = (&upper, &stop);
        scope.spawn(move || {
            let mut block = 0u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                block = (block + 1) % 8;
                let mut data = [0; 4096];
                upper.read(&mut data, block * 4096, &Vec::new()).unwrap();
                assert!(
                    data.chunks(8).all(|word| *word == data[..8]),
                    "block {block} is torn"
                );
                assert!(
                    data[7] == block as u8 || data[..8] == [0; 8],
                    "block {block} shows block {}",
                    data[7]
                );
            }
        });
    });
    let (_, used) = upper.usage();
    // A reader that is off the processor keeps blocks from being used again, but not for long.
    assert!(
        used < 24 << 20,
        "{used} bytes after writing 32 MiB to 8 blocks"
    );
}

#[test]
fn a_frozen_upper_refuses_writes_and_keeps_its_content() {
    let dir = scratch();
    let upper = Upper::create(&dir.path().join("u.lsmt"), &options(Durability::None)).unwrap();
    upper.write(0, &[1; 8192], &Vec::new()).unwrap();
    assert!(
        upper.layer().is_err() && upper.seal(true).is_err(),
        "not frozen yet"
    );
    upper.freeze();
    let file = fs::read(upper.path()).unwrap();
    assert!(matches!(
        upper.write(0, &[2; 4096], &Vec::new()),
        Err(Error::Frozen)
    ));
    assert!(matches!(
        upper.write(3, &[2; 4], &Vec::new()),
        Err(Error::Frozen)
    ));
    assert!(matches!(
        upper.zero(0, 4096, &Vec::new()),
        Err(Error::Frozen)
    ));
    assert!(matches!(upper.resize(4096), Err(Error::Frozen)));
    assert!(fs::read(upper.path()).unwrap() == file);
    let stack = Stack::build([Arc::new(upper.layer().unwrap())]).unwrap();
    let mut disk = vec![9; SIZE];
    stack.read_exact_at(&mut disk, 0).unwrap();
    assert!(disk[..8192] == [1; 8192] && disk[8192..].iter().all(|b| *b == 0));
}

#[test]
fn wrong_ranges_and_sizes_are_refused() {
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    for virtual_size in [0, 100, MAX_VIRTUAL_SIZE + 512] {
        let options = Options {
            virtual_size,
            ..options(Durability::None)
        };
        assert!(matches!(
            Upper::create(&path, &options),
            Err(Error::Argument(_))
        ));
        assert!(!path.exists());
    }
    let upper = Upper::create(&path, &options(Durability::None)).unwrap();
    for (offset, length) in [(SIZE as u64, 1), (SIZE as u64 - 1, 2), (u64::MAX, 1)] {
        assert!(matches!(
            upper.write(offset, &vec![0; length], &Vec::new()),
            Err(Error::Argument(_))
        ));
        assert!(matches!(
            upper.zero(offset, length as u64, &Vec::new()),
            Err(Error::Argument(_))
        ));
    }
    assert!(
        Upper::create(&path, &options(Durability::None)).is_err(),
        "an existing file is not overwritten"
    );
}

#[test]
fn a_journal_can_be_rewritten_at_any_time() {
    for rewrite_after in 0..STEPS.len() {
        let dir = scratch();
        let path = dir.path().join("u.lsmt");
        let below = lower();
        let mut disk = below.clone();
        disk.resize(SIZE, 0);
        let upper = Upper::create(&path, &options(Durability::Flush)).unwrap();
        let journal_len = || fs::metadata(path.with_extension("jrn")).unwrap().len() as usize;
        // Disks, journals and data files after each step from the rewrite on.
        let mut after = Vec::new();
        for (i, step) in STEPS.iter().enumerate() {
            apply(*step, &upper, &below, &mut disk);
            if i == rewrite_after {
                upper.checkpoint().unwrap();
            }
            if i >= rewrite_after {
                after.push((journal_len(), disk.clone(), fs::read(&path).unwrap()));
            }
        }
        let key = upper.read_state().key;
        let identity = upper.identity().clone();
        drop(upper);
        let journal = fs::read(path.with_extension("jrn")).unwrap();
        for (i, (length, disk, _)) in after.iter().enumerate() {
            // A crash while the record of the next step is written; its data is there.
            let next = after.get(i + 1).unwrap_or(&after[i]);
            for cut in [
                *length,
                (length + next.0) / 2,
                next.0.saturating_sub(1).max(*length),
            ] {
                let (found, _) = recover(dir.path(), &next.2, &journal[..cut]).unwrap();
                assert!(
                    found == *disk,
                    "rewritten after {rewrite_after}, crash after {i} more, cut at {cut}"
                );
            }
        }
        // To rewrite is to flush: that much survives the machine.
        let (length, flushed, data) = &after[0];
        let restarted = restarted(&journal[..*length], key, &identity);
        let (found, recovery) = recover(dir.path(), data, &restarted).unwrap();
        assert!(found == *flushed && recovery.machine_restarted && recovery.distrusted == 0);
    }
}

#[test]
fn writers_go_on_while_journals_are_rewritten() {
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    let upper = Upper::create(&path, &options(Durability::Process)).unwrap();
    let done = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for writer in 0..2u8 {
            let (upper, done) = (&upper, &done);
            scope.spawn(move || {
                for round in 0..1500u64 {
                    let block = round * 3 % 32 + u64::from(writer) * 32;
                    upper
                        .write(block * 4096, &[(round % 251) as u8; 4096], &Vec::new())
                        .unwrap();
                }
                done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
        }
        while done.load(std::sync::atomic::Ordering::Relaxed) < 2 {
            upper.checkpoint().unwrap();
        }
    });
    let before = content(&upper, &Vec::new());
    for block in 0..64 {
        let last = (0..1500u64)
            .rev()
            .find(|r| r * 3 % 32 == block % 32)
            .unwrap();
        assert!(before[block as usize * 4096] == (last % 251) as u8);
    }
    drop(upper);
    let (upper, recovery) = Upper::open(&path, Durability::Process).unwrap();
    assert_eq!(recovery.cut, 0);
    assert!(content(&upper, &Vec::new()) == before);
}

#[test]
fn what_later_records_replaced_need_not_be_in_the_file() {
    let dir = scratch();
    let path = dir.path().join("u.lsmt");
    let upper = Upper::create(&path, &options(Durability::Process)).unwrap();
    let (block, none) = (BLOCK_SIZE as usize, Vec::new());
    upper.write(0, &vec![1; block], &none).unwrap();
    upper.write(BLOCK_SIZE, &vec![2; 8 * block], &none).unwrap();
    upper.zero(BLOCK_SIZE, 8 * BLOCK_SIZE, &none).unwrap();
    drop(upper);
    // A seal that was cut short puts the index where replaced data was, and the file ends there.
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(2 * BLOCK_SIZE).unwrap();
    let (upper, recovery) = Upper::open(&path, Durability::Process).unwrap();
    assert_eq!(recovery.records, 3);
    let mut found = vec![9; 9 * block];
    upper.read(&mut found, 0, &none).unwrap();
    assert!(found[..block] == vec![1; block] && found[block..] == vec![0; 8 * block]);
    drop(upper);
    // What is still needed has to be there.
    file.set_len(BLOCK_SIZE).unwrap();
    assert!(matches!(
        Upper::open(&path, Durability::Process),
        Err(Error::Format { .. })
    ));
}
