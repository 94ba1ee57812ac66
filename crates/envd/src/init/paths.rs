//! Where things are in the initramfs.

/// State that outlives an agent; a directory only the first process and the agent can reach.
pub const STATE: &str = "/state";
/// Module files to load at boot, one path a line.
pub const MODULES_LIST: &str = "/modules.list";
/// The modules of the kernel, as the user's root sees them too.
pub const MODULES: &str = "/lib/modules";
/// Where the user's root is mounted before it becomes the root of everybody else.
pub const NEW_ROOT: &str = "/newroot";
/// What the kernel starts to get a module.
pub const MODPROBE: &str = "/sbin/modprobe";
