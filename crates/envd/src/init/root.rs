//! The user's root file system, which may hold anything or nothing.
//!
//! Every path is resolved as if the image were the root directory (`RESOLVE_IN_ROOT`): a link of the
//! image that points to `/etc` means its own `/etc`, never that of the initramfs.

use rustix::fs::{mkdirat, openat2, readlinkat, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{mount, mount_bind, MountFlags};
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Dangling links followed while a directory is created.
const LINK_LIMIT: usize = 8;

pub struct Root(OwnedFd);

/// A file system to mount in the root.
pub struct Mount {
    pub source: &'static str,
    pub path: &'static str,
    pub kind: &'static str,
    pub flags: MountFlags,
    pub data: &'static CStr,
}

impl Root {
    pub fn new(fd: OwnedFd) -> Root {
        Root(fd)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn open(&self, path: &Path) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.0, path, DIRECTORY, Mode::empty(), resolve)
    }

    /// Opens the directory `path`, creating what is missing. A link to a missing place gets its target
    /// created, so that `/lib -> usr/lib` stays as it is.
    pub fn directory(&self, path: &str, mode: u32) -> Result<OwnedFd, String> {
        let fail = |what: &Path, e: Errno| {
            format!(
                "cannot make the directory {path} of the image: {}: {e}",
                what.display()
            )
        };
        let mut at = PathBuf::new();
        let mut todo: Vec<_> = Path::new(path)
            .components()
            .rev()
            .map(|c| c.as_os_str().to_owned())
            .collect();
        let mut links = 0;
        let mut dir = self
            .open(Path::new("."))
            .map_err(|e| fail(Path::new("/"), e))?;
        while let Some(name) = todo.pop() {
            let next = at.join(&name);
            dir = match self.open(&next) {
                Ok(dir) => dir,
                Err(Errno::NOENT) => {
                    let mode = if todo.is_empty() { mode } else { 0o755 };
                    match mkdirat(&dir, &name, Mode::from_raw_mode(mode)) {
                        Ok(()) => {}
                        Err(Errno::EXIST) if links < LINK_LIMIT => {
                            // It exists but leads nowhere: a dangling link.
                            links += 1;
                            let target =
                                readlinkat(&dir, &name, Vec::new()).map_err(|e| fail(&next, e))?;
                            let target = Path::new(OsStr::from_bytes(target.as_bytes())).to_owned();
                            if target.is_absolute() {
                                at = PathBuf::new();
                                dir = self
                                    .open(Path::new("."))
                                    .map_err(|e| fail(Path::new("/"), e))?;
                            }
                            let names = target.components().rev().map(|c| c.as_os_str().to_owned());
                            todo.extend(names.filter(|n| n != "/"));
                            continue;
                        }
                        Err(e) => return Err(fail(&next, e)),
                    }
                    self.open(&next).map_err(|e| fail(&next, e))?
                }
                Err(e) => return Err(fail(&next, e)),
            };
            at = next;
        }
        Ok(dir)
    }

    pub fn mount(&self, what: &Mount) -> Result<(), String> {
        let target = self.directory(what.path, 0o755)?;
        mount(
            what.source,
            through(&target),
            what.kind,
            what.flags,
            what.data,
        )
        .map_err(|e| format!("cannot mount {} on /{}: {e}", what.kind, what.path))
    }

    /// Shows a directory of the initramfs in the image.
    pub fn bind(&self, source: &str, path: &str) -> Result<(), String> {
        let target = self.directory(path, 0o755)?;
        mount_bind(source, through(&target))
            .map_err(|e| format!("cannot mount {source} on /{path}: {e}"))
    }
}

/// A path that leads to exactly what `fd` is.
pub fn through(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// An image, and a directory beside it that nothing may touch.
    fn image() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["image", "outside"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let fd = rustix::fs::open(dir.path().join("image"), DIRECTORY, Mode::empty()).unwrap();
        (dir, Root::new(fd))
    }

    #[test]
    fn links_of_an_image_stay_inside() {
        let (dir, root) = image();
        let image = dir.path().join("image");
        for (target, link, path, made) in [
            ("usr/lib", "lib", "lib/modules", "usr/lib/modules"),
            ("/var/run", "run", "run", "var/run"),
            ("../../outside", "dev", "dev/pts", "outside/pts"),
            ("/etc/real", "sys", "sys/fs/cgroup", "etc/real/fs/cgroup"),
            ("a", "chain", "chain/x", "b/x"),
            ("b", "a", "a", "b"),
        ] {
            symlink(target, image.join(link)).unwrap();
            if link != "chain" {
                root.directory(path, 0o755).unwrap();
                assert!(image.join(made).is_dir(), "{path}");
            }
            assert!(
                std::fs::symlink_metadata(image.join(link))
                    .unwrap()
                    .is_symlink(),
                "{link} was replaced"
            );
        }
        root.directory("chain/x", 0o755).unwrap();
        assert!(image.join("b/x").is_dir());
        assert_eq!(
            std::fs::read_dir(dir.path().join("outside"))
                .unwrap()
                .count(),
            0
        );
    }

    #[test]
    fn loops_and_files_in_the_way_are_errors() {
        let (dir, root) = image();
        let image = dir.path().join("image");
        symlink("self", image.join("self")).unwrap();
        std::fs::write(image.join("file"), "").unwrap();
        for path in ["self", "self/x", "file", "file/x"] {
            assert!(root.directory(path, 0o755).is_err(), "{path}");
        }
        symlink("d2", image.join("d1")).unwrap();
        symlink("d1", image.join("d2")).unwrap();
        assert!(root.directory("d1/x", 0o755).is_err());
    }
}
