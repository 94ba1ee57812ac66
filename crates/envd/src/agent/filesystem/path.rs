//! From the path a client writes to the absolute path it means.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::agent::connect::Error;
use crate::agent::users::User;

/// Longest path taken from a client, in bytes, as in the kernel.
const PATH_LIMIT: usize = 4096;

/// Resolves `path` for `user`: empty is `workdir` or the home, `~` is the home, and relative paths
/// start at the home. The result is absolute and free of `.`, `..` and doubled slashes.
pub fn resolve(path: &str, user: &User, workdir: &str) -> Result<PathBuf, Error> {
    if path.contains('\0') {
        return Err(Error::invalid("a path must not contain a NUL byte"));
    }
    if path.len() > PATH_LIMIT {
        return Err(Error::invalid(format!(
            "a path has at most {PATH_LIMIT} bytes"
        )));
    }
    let full = match path.strip_prefix('~') {
        _ if path.is_empty() && !workdir.is_empty() => PathBuf::from(workdir),
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            user.home.join(rest.trim_start_matches('/'))
        }
        Some(_) => {
            return Err(Error::invalid(format!(
                "path '{path}': only '~' and '~/' are expanded"
            )))
        }
        None => user.home.join(path),
    };
    Ok(clean(&full))
}

/// Removes `.`, `..` and doubled slashes of an absolute path, by its letters alone.
pub fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            _ => {}
        }
    }
    out
}

/// The last component; `/` for the root.
pub fn base_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_else(|| OsStr::from_bytes(b"/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            home: "/home/user".into(),
            groups: vec![],
        }
    }

    #[test]
    fn relative_paths_start_at_the_home() {
        for (given, workdir, expected) in [
            ("", "", "/home/user"),
            ("", "/app", "/app"),
            ("~", "/app", "/home/user"),
            ("~/x", "", "/home/user/x"),
            ("~//x", "", "/home/user/x"),
            ("a/b", "/app", "/home/user/a/b"),
            ("/a//b/./c/../d/", "", "/a/b/d"),
            ("../../../..", "", "/"),
        ] {
            assert_eq!(
                resolve(given, &user(), workdir).unwrap(),
                Path::new(expected),
                "{given:?}"
            );
        }
        for bad in ["~root", "~root/x", "a\0b"] {
            assert!(resolve(bad, &user(), "").is_err(), "{bad:?}");
        }
        assert!(resolve(&"a".repeat(5000), &user(), "").is_err());
    }

    proptest! {
        #[test]
        fn results_are_absolute_and_plain(path in "[~./a-c\\PC]{0,30}") {
            if let Ok(resolved) = resolve(&path, &user(), "/w") {
                prop_assert!(resolved.is_absolute());
                prop_assert!(!resolved.components().any(|c| c == Component::ParentDir));
                prop_assert_eq!(clean(&resolved), resolved);
            }
        }
    }
}
