//! The users and groups of the guest, read from `/etc/passwd` and `/etc/group`.
//!
//! The binary is static and must not load the guest's name service libraries, so the files are
//! parsed here. They belong to the user of the guest, who may remove or break them: whoever was
//! found once is remembered and stays usable while the files are unreadable, and `root` always is.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::sys::read;

/// Larger account files are treated as unreadable, in bytes.
const FILE_LIMIT: u64 = 4 << 20;
/// Supplementary groups one user may have; the kernel allows 65536.
const GROUP_LIMIT: usize = 1024;
/// Users remembered for the time after their file is gone.
const KNOWN_LIMIT: usize = 256;

/// An account, complete enough to run a process as it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
    /// Supplementary groups, the primary one not included.
    pub groups: Vec<u32>,
}

impl User {
    fn root() -> User {
        User {
            name: "root".into(),
            uid: 0,
            gid: 0,
            home: "/root".into(),
            groups: Vec::new(),
        }
    }

    /// A bare uid, as container images use it: primary group 0 and no home.
    fn unnamed(uid: &str) -> Option<User> {
        let number = number(uid.as_bytes())?;
        Some(User {
            name: uid.into(),
            uid: number,
            gid: 0,
            home: "/".into(),
            groups: Vec::new(),
        })
    }

    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

/// Looks accounts up and remembers them.
#[derive(Debug, Default)]
pub struct Users {
    known: Mutex<HashMap<String, User>>,
}

impl Users {
    /// Finds a user by name, or by decimal uid if no account has that name; images may name a uid
    /// that has no account. `None` means the guest has no such user.
    pub fn find(&self, name: &str) -> Option<User> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match read::bounded(Path::new("/etc/passwd"), FILE_LIMIT) {
            Ok(passwd) => match search(&passwd, name) {
                Some(user) => Some(complete(user)),
                // An empty file is a damaged one; a filled one is the truth.
                None if passwd.is_empty() => known.get(name).cloned(),
                None => None,
            },
            Err(_) => known.get(name).cloned(),
        };
        let found = found
            .or_else(|| (name == "root").then(User::root))
            .or_else(|| User::unnamed(name));
        if let Some(user) = &found {
            if known.len() < KNOWN_LIMIT || known.contains_key(name) {
                known.insert(name.to_owned(), user.clone());
            }
        }
        found
    }
}

/// Adds the supplementary groups. An unreadable group file means none.
fn complete(mut user: User) -> User {
    if let Ok(group) = read::bounded(Path::new("/etc/group"), FILE_LIMIT) {
        user.groups = memberships(&group, &user.name, user.gid);
    }
    user
}

/// The fields of each well-formed line of a colon-separated account file.
fn records(file: &[u8], fields: usize) -> impl Iterator<Item = Vec<&[u8]>> {
    file.split(|b| *b == b'\n')
        .map(|line| line.split(|b| *b == b':').collect::<Vec<_>>())
        .filter(move |record| record.len() >= fields && !record[0].is_empty())
}

fn number(field: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(field).ok()?;
    // u32::MAX is "no change" to chown and setuid, never an id.
    text.parse()
        .ok()
        .filter(|id| *id != u32::MAX && text.bytes().all(|b| b.is_ascii_digit()))
}

fn account(record: &[&[u8]]) -> Option<User> {
    let home = match record[5] {
        b"" => PathBuf::from("/"),
        home => PathBuf::from(OsString::from_vec(home.to_vec())),
    };
    Some(User {
        name: String::from_utf8(record[0].to_vec()).ok()?,
        uid: number(record[2])?,
        gid: number(record[3])?,
        home: if home.is_absolute() {
            home
        } else {
            PathBuf::from("/")
        },
        groups: Vec::new(),
    })
}

fn search(passwd: &[u8], name: &str) -> Option<User> {
    if name.is_empty() {
        return None;
    }
    let by_name = records(passwd, 6)
        .filter(|r| r[0] == name.as_bytes())
        .find_map(|r| account(&r));
    by_name.or_else(|| {
        let uid = number(name.as_bytes())?;
        records(passwd, 6)
            .filter_map(|r| account(&r))
            .find(|user| user.uid == uid)
    })
}

fn memberships(group: &[u8], name: &str, primary: u32) -> Vec<u32> {
    let mut groups: Vec<u32> = records(group, 4)
        .filter(|r| {
            r[3].split(|b| *b == b',')
                .any(|member| member == name.as_bytes())
        })
        .filter_map(|r| number(r[2]))
        .filter(|gid| *gid != primary)
        .take(GROUP_LIMIT)
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// Names for many numeric ids, read once per listing.
#[derive(Debug, Default)]
pub struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    pub fn load() -> Names {
        let table = |path: &str| {
            let file = read::bounded(Path::new(path), FILE_LIMIT).unwrap_or_default();
            let mut names = HashMap::new();
            for record in records(&file, 3) {
                if let (Some(id), Ok(name)) = (number(record[2]), std::str::from_utf8(record[0])) {
                    names.entry(id).or_insert_with(|| name.to_owned());
                }
            }
            names
        };
        Names {
            users: table("/etc/passwd"),
            groups: table("/etc/group"),
        }
    }

    pub fn user(&self, uid: u32) -> String {
        self.users
            .get(&uid)
            .cloned()
            .unwrap_or_else(|| uid.to_string())
    }

    pub fn group(&self, gid: u32) -> String {
        self.groups
            .get(&gid)
            .cloned()
            .unwrap_or_else(|| gid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n# comment\nbroken:x:no:0::/:\n\
        user:x:1000:1001:,,,:/home/user:/bin/bash\nrel:x:5:5::here:/bin/sh\nhuge:x:4294967295:1::/:\n";

    #[test]
    fn accounts_are_found_by_name_and_number() {
        let user = search(PASSWD, "user").unwrap();
        assert_eq!(
            (user.uid, user.gid, user.home.as_path()),
            (1000, 1001, Path::new("/home/user"))
        );
        assert_eq!(search(PASSWD, "1000"), Some(user));
        assert_eq!(search(PASSWD, "rel").unwrap().home, Path::new("/"));
        for absent in ["", "use", "user:x", "broken", "huge", "-1", "+0"] {
            assert_eq!(search(PASSWD, absent), None, "{absent}");
        }
    }

    #[test]
    fn groups_are_those_that_list_the_user() {
        let group =
            b"sudo:x:27:other,user\nuser:x:1001:user\ndocker:x:99:user\nno:x:5:users\nbad:x:q:user";
        assert_eq!(memberships(group, "user", 1001), [27, 99]);
    }

    #[test]
    fn root_is_known_without_files() {
        assert_eq!(Users::default().find("root").unwrap().uid, 0);
    }

    proptest! {
        #[test]
        fn hostile_account_files_do_not_panic(file in prop::collection::vec(any::<u8>(), 0..400), name in "\\PC{0,10}") {
            search(&file, &name);
            memberships(&file, &name, 0);
        }
    }
}
