//! Loading kernel modules.

use rustix::io::Errno;
use rustix::system::finit_module;
use std::fs::File;
use std::io;
use std::path::Path;

use super::paths::MODULES_LIST;

/// `MODULE_INIT_COMPRESSED_FILE` of <linux/module.h>.
const COMPRESSED: i32 = 4;

/// Loads the modules of the list, in its order. A missing list means a kernel with all it needs.
pub fn load_list() -> Result<(), String> {
    let list = match std::fs::read_to_string(MODULES_LIST) {
        Ok(list) => list,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(format!("cannot read {MODULES_LIST}: {e}")),
    };
    for path in list
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        load(Path::new(path)).map_err(|e| format!("cannot load the module {path}: {e}"))?;
    }
    Ok(())
}

/// Loads one module file; one that is loaded already is fine.
pub fn load(path: &Path) -> io::Result<()> {
    let compressed = path.extension().is_some_and(|e| e != "ko");
    match finit_module(
        File::open(path)?,
        c"",
        if compressed { COMPRESSED } else { 0 },
    ) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(Errno::NOENT) => Err(io::Error::other("it needs a module that is not loaded yet")),
        Err(e) => Err(e.into()),
    }
}
