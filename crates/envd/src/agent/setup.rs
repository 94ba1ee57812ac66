//! From the start of the agent to the point where it lives in the user's root.

use rustix::fs::Mode;
use rustix::process::{chdir, chroot, fchdir, geteuid, umask};
use rustix::thread::set_thread_groups;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use super::identity::Identity;
use super::kernel::Kernel;

/// Keeps descriptors that were left open by whoever started the agent from its own children.
pub fn seal_descriptors() -> Result<(), String> {
    // SAFETY: the call only sets a flag on open descriptors.
    let result = unsafe { libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
    if result != 0 {
        return Err(format!(
            "cannot seal descriptors: {}",
            std::io::Error::last_os_error()
        ));
    }
    Ok(())
}

/// Opens what is needed from outside and changes the root: to `root`, or to what the first process
/// of a guest passed as descriptor `guest`, or not at all.
pub fn enter(root: Option<&Path>, guest: Option<RawFd>) -> Result<(Kernel, Identity), String> {
    umask(Mode::from_raw_mode(0o022));
    let mut kernel =
        Kernel::open(guest.is_some()).map_err(|e| format!("cannot open kernel interfaces: {e}"))?;
    let mut identity = Identity::default();
    if let Some(state) = &kernel.guest {
        if let Some(saved) = state
            .load()
            .map_err(|e| format!("cannot read the saved identity: {e}"))?
        {
            // Going on without it would accept any client, so a damaged one is fatal.
            identity = serde_json::from_slice(&saved)
                .map_err(|e| format!("the saved identity is damaged: {e}"))?;
        }
    }
    if geteuid().is_root() {
        set_thread_groups(&[]).map_err(|e| format!("cannot drop supplementary groups: {e}"))?;
    }
    if let Some(fd) = guest {
        // SAFETY: the first process passes this descriptor for us to own; nothing else uses its number.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        fchdir(&fd)
            .and_then(|()| chroot("."))
            .and_then(|()| chdir("/"))
            .map_err(|e| format!("cannot enter the root of the user: {e}"))?;
    } else if let Some(root) = root {
        chroot(root)
            .and_then(|()| chdir("/"))
            .map_err(|e| format!("cannot change the root to {}: {e}", root.display()))?;
    }
    kernel.enter();
    Ok((kernel, identity))
}
