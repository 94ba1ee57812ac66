//! Growing the file system to the size of its device.

use rustix::fs::{fstat, fstatvfs, major, minor};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use super::read;

/// `_IOW('f', 16, __u64)` of <linux/ext4.h>: the new size in blocks.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
/// sysfs gives sizes in these units whatever the device's own, in bytes.
const SECTOR: u64 = 512;

/// Grows the mounted ext4 that `root` is on; does nothing if it fills its device already.
/// `sys` is a sysfs.
pub fn grow(root: BorrowedFd<'_>, sys: BorrowedFd<'_>) -> Result<(), String> {
    let fail = |what: &str, e: io::Error| format!("cannot grow the root file system: {what}: {e}");
    let device = fstat(root).map_err(|e| fail("status", e.into()))?.st_dev;
    let block = fstatvfs(root).map_err(|e| fail("size", e.into()))?.f_bsize;
    let size = format!("dev/block/{}:{}/size", major(device), minor(device));
    let size = read::bounded_at(sys, Path::new(&size), 100).map_err(|e| fail("device size", e))?;
    let sectors: u64 = String::from_utf8_lossy(&size)
        .trim()
        .parse()
        .map_err(|_| "cannot grow the root file system: sysfs gives no device size".to_owned())?;
    let blocks = sectors * SECTOR / block.max(1);
    // SAFETY: the descriptor is open and the kernel reads one u64. The call returns at once if the
    // file system has that many blocks already.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &blocks) };
    if result < 0 {
        return Err(fail(
            &format!("resize to {blocks} blocks"),
            io::Error::last_os_error(),
        ));
    }
    Ok(())
}
