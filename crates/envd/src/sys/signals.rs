//! Signal state that a new program must not inherit.

/// Unblocks all signals and gives them their default effect. Async-signal-safe: for use between fork
/// and exec.
pub fn reset() {
    // SAFETY: the set is initialised before it is read, and no call touches memory other than it.
    // Numbers that cannot be changed are refused without effect.
    unsafe {
        for signal in 1..=libc::SIGRTMAX() {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}
