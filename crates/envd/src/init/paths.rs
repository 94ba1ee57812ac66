//! Where things are in the initramfs.

/// State that outlives an agent; a directory only the first process and the agent can reach.
pub const STATE: &str = "/state";
/// Control group of everything the user runs.
pub const USER_CGROUP: &str = "/sys/fs/cgroup/user";
