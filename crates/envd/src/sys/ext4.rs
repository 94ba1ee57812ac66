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

/// Size in bytes of the block device that `root` is on; `sys` is a sysfs.
pub fn device_size(root: BorrowedFd<'_>, sys: BorrowedFd<'_>) -> Result<u64, String> {
    let device = fstat(root)
        .map_err(|e| format!("cannot read the status of the root: {e}"))?
        .st_dev;
    let path = format!("dev/block/{}:{}/size", major(device), minor(device));
    let size = read::bounded_at(sys, Path::new(&path), 100)
        .map_err(|e| format!("cannot read /sys/{path}: {e}"))?;
    let sectors = String::from_utf8_lossy(&size).trim().parse::<u64>();
    sectors
        .map(|sectors| sectors * SECTOR)
        .map_err(|_| format!("/sys/{path} is not a number"))
}

/// Grows the mounted ext4 that `root` is on to `size` bytes. Nothing happens if it has that size.
pub fn grow(root: BorrowedFd<'_>, size: u64) -> Result<(), String> {
    let fail = |e: io::Error| format!("cannot grow the root file system to {size} bytes: {e}");
    let block = fstatvfs(root).map_err(|e| fail(e.into()))?.f_bsize;
    let blocks = size / block.max(1);
    // SAFETY: the descriptor is open and the kernel reads one u64.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &blocks) };
    if result < 0 {
        return Err(fail(io::Error::last_os_error()));
    }
    Ok(())
}
