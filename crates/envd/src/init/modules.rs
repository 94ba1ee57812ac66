//! Loading kernel modules: at boot from a list, later when the kernel asks for one.
//!
//! The kernel starts `/sbin/modprobe` of the first process's root when it lacks a driver, a file system
//! or a protocol. That is this binary again, so loading on demand works for every image.

use rustix::io::Errno;
use rustix::system::{finit_module, uname};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::paths::{MODPROBE, MODULES, MODULES_LIST};

/// `MODULE_INIT_COMPRESSED_FILE` of <linux/module.h>.
const COMPRESSED: i32 = 4;

/// Loads the modules of the list, in its order. A missing list means a kernel with all it needs.
pub fn load_list() -> Result<(), String> {
    let list = match fs::read_to_string(MODULES_LIST) {
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
fn load(path: &Path) -> io::Result<()> {
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

/// Lets the kernel find us when it wants a module.
pub fn offer() -> io::Result<()> {
    fs::create_dir_all(Path::new(MODPROBE).parent().unwrap_or(Path::new("/")))?;
    std::os::unix::fs::symlink(std::env::current_exe()?, MODPROBE)
}

/// Called by the kernel as `modprobe -q -- NAME`. The exit code says whether NAME is loaded now.
pub fn modprobe(args: &[OsString]) -> ExitCode {
    let directory = Path::new(MODULES).join(&*uname().release().to_string_lossy());
    let names = args
        .iter()
        .filter_map(|a| a.to_str())
        .filter(|a| !a.starts_with('-'));
    for name in names {
        if request(&directory, name).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Loads what `name` stands for: a module, or all modules with a matching alias.
fn request(directory: &Path, name: &str) -> io::Result<()> {
    let dependencies = Dependencies::parse(&fs::read_to_string(directory.join("modules.dep"))?);
    let mut wanted = vec![plain(name)];
    if !dependencies.0.contains_key(&wanted[0]) {
        wanted = aliases(&fs::read_to_string(directory.join("modules.alias"))?, name);
    }
    let mut result = Err(io::ErrorKind::NotFound.into());
    for module in wanted {
        for path in dependencies.files(&module) {
            result = load(&directory.join(path));
            if result.is_err() {
                break;
            }
        }
    }
    result
}

/// The name of a module as the kernel spells it.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// `modules.dep`: for each module its file and those it needs.
struct Dependencies(HashMap<String, Vec<PathBuf>>);

impl Dependencies {
    fn parse(text: &str) -> Dependencies {
        let modules = text.lines().filter_map(|line| {
            let (file, needs) = line.split_once(':')?;
            let name = Path::new(file).file_name()?.to_str()?.split('.').next()?;
            let files = std::iter::once(file).chain(needs.split_ascii_whitespace());
            Some((plain(name), files.map(PathBuf::from).collect()))
        });
        Dependencies(modules.collect())
    }

    /// The files to load for a module, in order: what is needed by others comes last in the file.
    fn files(&self, module: &str) -> impl Iterator<Item = &PathBuf> {
        self.0
            .get(module)
            .map(|files| files.iter().rev())
            .into_iter()
            .flatten()
    }
}

/// The modules whose alias in `modules.alias` matches.
fn aliases(text: &str, name: &str) -> Vec<String> {
    let line = |line: &str| {
        let mut words = line.strip_prefix("alias ")?.split_ascii_whitespace();
        let (pattern, module) = (words.next()?, words.next()?);
        let matching =
            matches(pattern.as_bytes(), name.as_bytes()) || plain(pattern) == plain(name);
        matching.then(|| plain(module))
    };
    text.lines().filter_map(line).collect()
}

/// Whether a shell pattern with `*`, `?` and `[...]` matches the whole text.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on after a mismatch: after the last star, one character further in the text.
    let mut retry = None;
    while t < text.len() {
        let length = match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                retry = Some((p, t));
                continue;
            }
            Some(b'?') => Some(1),
            Some(b'[') => set(&pattern[p..], text[t]),
            Some(byte) => (*byte == text[t]).then_some(1),
            None => None,
        };
        match (length, &mut retry) {
            (Some(length), _) => {
                p += length;
                t += 1;
            }
            (None, Some((star, from))) => {
                *from += 1;
                (p, t) = (*star, *from);
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Length of the set at the start of `pattern` if it contains `byte`.
fn set(pattern: &[u8], byte: u8) -> Option<usize> {
    let end = pattern.iter().skip(2).position(|b| *b == b']')? + 2;
    let mut members = &pattern[1..end];
    while let [first, rest @ ..] = members {
        let (last, rest) = match rest {
            [b'-', last, rest @ ..] => (last, rest),
            _ => (first, rest),
        };
        if (first..=last).contains(&&byte) {
            return Some(end + 1);
        }
        members = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_match_like_in_a_shell() {
        for (pattern, text, expected) in [
            ("virtio:d00000001v*", "virtio:d00000001v00001AF4", true),
            ("virtio:d00000001v*", "virtio:d00000002v00001AF4", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("fs-[ax-z]?", "fs-y1", true),
            ("fs-[ax-z]?", "fs-b1", false),
            ("*", "", true),
            ("", "a", false),
            ("[a", "a", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes()),
                expected,
                "{pattern} {text}"
            );
        }
    }

    #[test]
    fn needed_modules_are_loaded_first() {
        let dependencies =
            Dependencies::parse("kernel/net-a.ko.xz: kernel/b.ko kernel/c.ko\nkernel/c.ko:\n");
        let files: Vec<_> = dependencies
            .files("net_a")
            .map(|p| p.to_str().unwrap())
            .collect();
        assert_eq!(files, ["kernel/c.ko", "kernel/b.ko", "kernel/net-a.ko.xz"]);
        assert_eq!(dependencies.files("none").count(), 0);
    }

    #[test]
    fn aliases_name_modules() {
        let text = "# comment\nalias rtnl-link-veth veth\nalias pci:v* some-mod\nalias net-pf-16-proto-9 x\n";
        assert_eq!(aliases(text, "rtnl-link-veth"), ["veth"]);
        assert_eq!(aliases(text, "pci:v00"), ["some_mod"]);
        assert!(aliases(text, "rtnl").is_empty());
    }

    proptest! {
        #[test]
        fn a_star_matches_what_was_cut_out(text in "[a-c]{0,12}", from in 0usize..12, to in 0usize..12) {
            let (from, to) = (from.min(text.len()), to.min(text.len()));
            let (from, to) = (from.min(to), from.max(to));
            let pattern = format!("{}*{}", &text[..from], &text[to..]);
            prop_assert!(matches(pattern.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn hostile_patterns_do_not_panic(pattern in "[a*?\\[\\]-]{0,20}", text in "[a\\[-]{0,20}") {
            matches(pattern.as_bytes(), text.as_bytes());
        }
    }
}
