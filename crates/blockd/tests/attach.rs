//! What every way to attach images has to do; see `aenv_blockd::attach` for the promises.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use common::{errno, open_direct, open_rw, patterned, read_at, Node};
use rustix::fs::{fallocate, FallocateFlags};
use serde_json::json;

const MIB: u64 = 1 << 20;

#[test]
fn an_image_is_a_file_with_its_size_owner_and_mode() {
    let node = Node::start();
    let spec = json!({ "layers": [], "virtual_size": 3 * MIB + 512, "mode": "disk", "read_only": false,
                       "uid": 65534, "gid": 12, "permissions": 0o640 });
    node.ok("PUT", "/v1/images/disk", spec);
    let found = fs::metadata(node.mount().join("disk")).unwrap();
    assert!(found.is_file());
    assert_eq!(found.len(), 3 * MIB + 512);
    assert_eq!(
        (found.uid(), found.gid(), found.mode() & 0o7777),
        (65534, 12, 0o640)
    );
    assert_eq!(
        errno(fs::metadata(node.mount().join("other"))),
        libc::ENOENT
    );
    assert_eq!(
        errno(fs::metadata(node.mount().join("disk/x"))),
        libc::ENOTDIR
    );
}

#[test]
fn only_who_is_admitted_can_open_it() {
    let node = Node::start();
    fs::set_permissions(
        node.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o711),
    )
    .unwrap();
    let reads = |path: &std::path::Path| {
        Command::new("head")
            .arg("-c1")
            .arg(path)
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap()
            .status
            .success()
    };
    let mine = json!({ "layers": [], "virtual_size": MIB, "mode": "disk", "read_only": false });
    let theirs = json!({ "layers": [], "virtual_size": MIB, "mode": "disk", "read_only": false, "uid": 65534 });
    node.ok("PUT", "/v1/images/mine", mine);
    node.ok("PUT", "/v1/images/theirs", theirs);
    assert!(!reads(&node.mount().join("mine")));
    assert!(reads(&node.mount().join("theirs")));
}

#[test]
fn what_is_written_is_read() {
    let node = Node::start();
    let path = node.disk("disk", 8 * MIB);
    let file = open_rw(&path);
    let mut oracle = vec![0u8; 8 << 20];
    // Lengths and positions of any alignment, in single requests and in several.
    let mut seed = 7u64;
    for (at, len) in [
        (0, 4096),
        (4096 * 3 + 1, 1),
        (511, 514),
        (MIB as usize - 7, 4096),
        (2 * MIB as usize, 3 << 20),
        (5_000_001, 1_234_567),
        (8 * MIB as usize - 3, 3),
    ] {
        seed += 1;
        let data = patterned(seed, len);
        file.write_all_at(&data, at as u64).unwrap();
        oracle[at..at + len].copy_from_slice(&data);
    }
    assert!(read_at(&file, 0, oracle.len()) == oracle);
    assert!(read_at(&open_rw(&path), 4097, 100_000) == oracle[4097..104_097]);
    let mut rest = [1; 16];
    assert_eq!(file.read_at(&mut rest, 8 * MIB - 3).unwrap(), 3);
    assert_eq!(file.read_at(&mut rest, 8 * MIB).unwrap(), 0);
    file.sync_all().unwrap();
    file.sync_data().unwrap();
}

#[test]
fn a_disk_does_not_grow_or_shrink_by_itself() {
    let node = Node::start();
    let file = open_rw(&node.disk("disk", MIB));
    assert_eq!(errno(file.write_at(b"x", MIB)), libc::ENOSPC);
    assert_eq!(errno(file.write_at(&[1; 4096], MIB - 512)), libc::ENOSPC);
    assert_eq!(errno(file.set_len(0)), libc::EPERM);
    assert_eq!(errno(file.set_len(2 * MIB)), libc::EPERM);
    file.set_len(MIB).unwrap();
    assert_eq!(
        errno(fs::File::create(node.mount().join("disk"))),
        libc::EPERM
    );
    assert_eq!(file.metadata().unwrap().len(), MIB);
    assert!(
        read_at(&file, 0, MIB as usize) == vec![0; MIB as usize],
        "a refused write left traces"
    );
}

#[test]
fn holes_read_as_zeros() {
    let node = Node::start();
    let file = open_rw(&node.disk("disk", 4 * MIB));
    let data = patterned(1, 4 << 20);
    file.write_all_at(&data, 0).unwrap();
    let mut oracle = data;
    let keep = FallocateFlags::KEEP_SIZE;
    for (flags, at, len) in [
        (keep | FallocateFlags::PUNCH_HOLE, 4096, 8192u64),
        (keep | FallocateFlags::PUNCH_HOLE, MIB + 5, 10_000),
        (FallocateFlags::ZERO_RANGE, 2 * MIB, MIB),
        (keep | FallocateFlags::ZERO_RANGE, 4 * MIB - 100, 100),
    ] {
        fallocate(&file, flags, at, len).unwrap();
        oracle[at as usize..(at + len) as usize].fill(0);
    }
    // Reserving space is a promise we need not keep track of.
    fallocate(&file, keep, 0, MIB).unwrap();
    assert!(read_at(&file, 0, 4 << 20) == oracle);
    let outside = fallocate(&file, keep | FallocateFlags::PUNCH_HOLE, 4 * MIB, 4096);
    assert_eq!(outside.unwrap_err().raw_os_error(), libc::ENOSPC);
    let collapse = fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(collapse.unwrap_err().raw_os_error(), libc::EOPNOTSUPP);
}

#[test]
fn read_only_images_can_be_opened_for_writing_but_not_written() {
    let node = Node::start();
    let data = patterned(3, 1 << 20);
    open_rw(&node.disk("source", MIB))
        .write_all_at(&data, 0)
        .unwrap();
    let layers = node.seal("source");
    for mode in ["disk", "memory"] {
        let id = format!("fixed-{mode}");
        let file = open_rw(&node.fixed(&id, mode, &layers));
        assert!(read_at(&file, 0, 1 << 20) == data);
        assert_eq!(
            errno(open_direct(&node.mount().join(&id)).write_at(&Aligned::new().0, 0)),
            libc::EROFS
        );
        let hole = fallocate(
            &file,
            FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
            0,
            4096,
        );
        assert_eq!(hole.unwrap_err().raw_os_error(), libc::EOPNOTSUPP);
        file.sync_all().unwrap();
        assert!(read_at(&open_rw(&node.mount().join(&id)), 0, 1 << 20) == data);
    }
}

#[repr(align(4096))]
struct Aligned([u8; 4096]);

impl Aligned {
    fn new() -> Aligned {
        Aligned([7; 4096])
    }
}

#[test]
fn private_mappings_of_memory_images_share_their_pages() {
    let node = Node::start();
    let data = patterned(4, 1 << 20);
    open_rw(&node.disk("source", MIB))
        .write_all_at(&data, 0)
        .unwrap();
    let layers = node.seal("source");
    let path = node.fixed("memory", "memory", &layers);
    let (one, two) = (Mapping::new(&path, 1 << 20), Mapping::new(&path, 1 << 20));
    assert!(one.bytes() == data);
    // What the first one read is there for the second, also after all descriptors were closed and opened again.
    assert!(two.resident().iter().all(|page| *page));
    two.write(5000, 99);
    assert_eq!(two.bytes()[5000], 99);
    assert!(one.bytes() == data, "a private write showed elsewhere");
    assert!(
        fs::read(&path).unwrap() == data,
        "a private write reached the image"
    );
}

/// A private, writable mapping of a whole file.
struct Mapping {
    base: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(path: &std::path::Path, len: usize) -> Mapping {
        let file = open_rw(path);
        let (read, write) = (libc::PROT_READ, libc::PROT_WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                read | write,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Mapping {
            base: base.cast(),
            len,
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, `len` long, and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    fn write(&self, at: usize, byte: u8) {
        assert!(at < self.len);
        // SAFETY: inside the writable mapping; no slice of it is alive.
        unsafe { self.base.add(at).write_volatile(byte) }
    }

    fn resident(&self) -> Vec<bool> {
        let mut pages = vec![0u8; self.len / 4096];
        // SAFETY: the vector has one byte for each page of the mapping.
        let done = unsafe { libc::mincore(self.base.cast(), self.len, pages.as_mut_ptr()) };
        assert_eq!(done, 0);
        pages.iter().map(|page| page & 1 == 1).collect()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by self and nobody else knows it.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

#[test]
fn data_and_holes_can_be_found() {
    let node = Node::start();
    let file = open_rw(&node.disk("source", 4 * MIB));
    file.write_all_at(&[1; 8192], MIB).unwrap();
    let layers = node.seal("source");
    let mut fixed = open_rw(&node.fixed("fixed", "disk", &layers));
    let mut seek = |whence: fn(i64) -> SeekFrom, at: i64| fixed.seek(whence(at));
    let _ = &mut seek;
    let find = |file: &fs::File, at: u64, whence: i32| {
        // SAFETY: lseek takes numbers only.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at as i64, whence) };
        if found < 0 {
            Err(std::io::Error::last_os_error())
        } else {
            Ok(found as u64)
        }
    };
    assert_eq!(find(&fixed, 0, libc::SEEK_DATA).unwrap(), MIB);
    assert_eq!(find(&fixed, MIB + 100, libc::SEEK_DATA).unwrap(), MIB + 100);
    assert_eq!(find(&fixed, MIB, libc::SEEK_HOLE).unwrap(), MIB + 8192);
    assert_eq!(find(&fixed, 0, libc::SEEK_HOLE).unwrap(), 0);
    assert_eq!(errno(find(&fixed, 2 * MIB, libc::SEEK_DATA)), libc::ENXIO);
    assert_eq!(errno(find(&fixed, 4 * MIB, libc::SEEK_HOLE)), libc::ENXIO);
    // Nothing that is data may ever be called a hole.
    assert_eq!(find(&file, 0, libc::SEEK_HOLE).unwrap(), 4 * MIB);
    assert_eq!(fixed.seek(SeekFrom::End(0)).unwrap(), 4 * MIB);
}

#[test]
fn a_resized_image_shows_its_new_size_to_those_who_have_it_open() {
    let node = Node::start();
    let file = open_rw(&node.disk("disk", MIB));
    file.write_all_at(&[5; 4096], MIB - 4096).unwrap();
    node.ok(
        "POST",
        "/v1/images/disk/resize",
        json!({ "virtual_size": 3 * MIB }),
    );
    assert_eq!(file.metadata().unwrap().len(), 3 * MIB);
    assert!(read_at(&file, MIB, 4096) == [0; 4096]);
    file.write_all_at(&[6; 512], 3 * MIB - 512).unwrap();
    let (status, answer) = node.call(
        "POST",
        "/v1/images/disk/resize",
        json!({ "virtual_size": MIB }),
    );
    assert_eq!(status, 409, "{answer}");
}

#[test]
fn a_closed_image_is_gone_and_its_name_can_be_used_again() {
    let node = Node::start();
    let path = node.disk("disk", MIB);
    let file = open_rw(&path);
    file.write_all_at(&[1; 4096], 0).unwrap();
    node.ok("DELETE", "/v1/images/disk", json!(null));
    assert_eq!(errno(fs::metadata(&path)), libc::ENOENT);
    assert_eq!(errno(file.read_at(&mut [0; 512], 0)), libc::ESTALE);
    assert_eq!(errno(file.write_at(&[0; 512], 0)), libc::ESTALE);
    let again = open_rw(&node.disk("disk", 2 * MIB));
    assert_eq!(again.metadata().unwrap().len(), 2 * MIB);
    assert!(
        read_at(&again, 0, 4096) == [0; 4096],
        "data of the old image showed in the new one"
    );
    assert_eq!(errno(file.read_at(&mut [0; 512], 0)), libc::ESTALE);
    node.ok("DELETE", "/v1/images/none", json!(null));
}

#[test]
fn a_listing_is_complete_and_nothing_else_can_be_made() {
    let node = Node::start();
    let mut names = BTreeSet::new();
    for i in 0..300 {
        let id = format!("image-{i}-{}", "x".repeat(i % 60));
        node.disk(&id, 4096);
        names.insert(id);
    }
    let listed: BTreeSet<String> = fs::read_dir(node.mount())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(listed, names);
    let inside = |name: &str| node.mount().join(name);
    assert!(fs::write(inside("new"), b"x").is_err());
    assert!(fs::create_dir(inside("new")).is_err());
    assert!(fs::remove_file(inside("image-0-")).is_err());
    assert!(fs::rename(inside("image-0-"), inside("new")).is_err());
    assert!(fs::hard_link(inside("image-0-"), inside("new")).is_err());
    assert_eq!(listed.len(), 300);
}

#[test]
fn many_writers_and_readers_see_their_own_data() {
    let node = Node::start();
    let path = node.disk("disk", 16 * MIB);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let (path, stop) = (&path, &stop);
            scope.spawn(move || {
                let file = open_rw(path);
                let base = worker * 4 * MIB;
                for round in 0..60 {
                    let seed = worker << 32 | round;
                    let len = 1 + (seed.wrapping_mul(7919) % 200_000) as usize;
                    let at = base + seed.wrapping_mul(104_729) % (4 * MIB - len as u64);
                    let data = patterned(seed, len);
                    file.write_all_at(&data, at).unwrap();
                    assert!(
                        read_at(&file, at, len) == data,
                        "worker {worker} round {round}"
                    );
                }
                stop.store(true, SeqCst);
            });
        }
        scope.spawn(|| {
            // Seals in the middle of everything change nothing for anyone.
            while !stop.load(SeqCst) {
                node.seal("disk");
            }
        });
    });
}

#[test]
fn two_daemons_do_not_share_a_state_directory() {
    let node = Node::start();
    let second = Command::new(env!("CARGO_BIN_EXE_aenv-blockd"))
        .args(["serve", "--state"])
        .arg(node.state())
        .arg("--mount")
        .arg(node.dir.path().join("mnt2"))
        .arg("--control")
        .arg(node.dir.path().join("control2"))
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(2));
    let message = String::from_utf8(second.stderr).unwrap();
    assert!(
        message.contains(&format!("(process {})", node.pid())),
        "{message}"
    );
}
