//! Signal state that a new program must not inherit.

/// Size of the kernel's signal sets in bytes, and number of signals.
const SET_SIZE: usize = 8;
const SIGNALS: i32 = 64;

/// Unblocks all signals and gives them their default effect. Async-signal-safe: for use between fork
/// and exec. Asks the kernel directly, because the C library keeps two signals to itself.
pub fn reset() {
    // struct sigaction of the kernel: handler SIG_DFL, no flags, no restorer, empty mask.
    let default = [0u64; 4];
    let none = 0u64;
    for signal in 1..=SIGNALS {
        // SAFETY: the kernel reads one struct sigaction. SIGKILL and SIGSTOP are refused without effect.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                &default,
                std::ptr::null::<u64>(),
                SET_SIZE,
            )
        };
    }
    // SAFETY: the kernel reads one signal set.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &none,
            std::ptr::null::<u64>(),
            SET_SIZE,
        )
    };
}
