//! What clients are told about an object of the file system.

use rustix::fs::{FileType, Mode, OFlags, Stat};
use serde::Serialize;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use time::format_description::well_known::Rfc3339;
use time::OffsetDateTime;

use super::metadata::{self, Metadata};
use super::path::base_name;
use super::walk::{kind, Last, Place, Walk};
use crate::agent::users::{Names, User};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub name: String,
    pub r#type: &'static str,
    pub path: String,
    /// Bytes; a string because the field is a 64-bit integer.
    pub size: String,
    /// Permission bits only.
    pub mode: u32,
    pub permissions: String,
    pub owner: String,
    pub group: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[serde(skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
}

const UNSPECIFIED: &str = "FILE_TYPE_UNSPECIFIED";

fn type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "FILE_TYPE_FILE",
        FileType::Directory => "FILE_TYPE_DIRECTORY",
        _ => UNSPECIFIED,
    }
}

/// Describes the object at `place`, which clients know as `path`. A link keeps its own size and owner
/// but has the type and mode of what it leads to.
pub fn describe(user: &User, names: &Names, place: &Place, path: &Path) -> io::Result<Entry> {
    let stat = place.stat()?;
    let mut entry = Entry {
        name: base_name(path).to_string_lossy().into_owned(),
        r#type: type_name(kind(&stat)),
        path: path.to_string_lossy().into_owned(),
        size: stat.st_size.to_string(),
        mode: stat.st_mode & 0o777,
        permissions: permissions(stat.st_mode),
        owner: names.user(stat.st_uid),
        group: names.group(stat.st_gid),
        modified_time: modified(&stat),
        symlink_target: None,
        metadata: Metadata::new(),
    };
    match kind(&stat) {
        FileType::Symlink => {
            let target = target(user, path);
            entry.mode = target.as_ref().map_or(0, |(_, stat)| stat.st_mode & 0o777);
            entry.r#type = target
                .as_ref()
                .map_or(UNSPECIFIED, |(_, stat)| type_name(kind(stat)));
            entry.symlink_target = target.map(|(path, _)| path.to_string_lossy().into_owned());
        }
        FileType::RegularFile | FileType::Directory => {
            // Reading attributes needs a real descriptor; who may not open the file sees none.
            if let Ok(fd) = place.open(OFlags::RDONLY, Mode::empty()) {
                entry.metadata = metadata::read(fd.as_fd()).unwrap_or_default();
            }
        }
        _ => {}
    }
    Ok(entry)
}

/// Where a link ends and what is there, if it does not dangle.
fn target(user: &User, path: &Path) -> Option<(PathBuf, Stat)> {
    let place = Walk::new(user).find(path, Last::Follow).ok()?;
    let stat = place.stat().ok()?;
    Some((place.path, stat))
}

fn modified(stat: &Stat) -> Option<String> {
    let nanoseconds = i128::from(stat.st_mtime) * 1_000_000_000 + stat.st_mtime_nsec as i128;
    // Times outside of the years 0 to 9999 have no such text.
    OffsetDateTime::from_unix_timestamp_nanos(nanoseconds)
        .ok()?
        .format(&Rfc3339)
        .ok()
}

/// Type and permissions in the notation clients expect: `-rw-r--r--`, `Lrwxrwxrwx`, `dtrwxrwxrwx`.
fn permissions(mode: u32) -> String {
    let mut text = String::new();
    match FileType::from_raw_mode(mode) {
        FileType::Directory => text.push('d'),
        FileType::Symlink => text.push('L'),
        FileType::BlockDevice => text.push('D'),
        FileType::CharacterDevice => text.push_str("Dc"),
        FileType::Fifo => text.push('p'),
        FileType::Socket => text.push('S'),
        _ => {}
    }
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (shift, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> shift) != 0 {
            letter
        } else {
            '-'
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_spelled_as_clients_expect() {
        for (mode, text) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o041_777, "dtrwxrwxrwx"),
            (0o104_755, "urwxr-xr-x"),
            (0o020_620, "Dcrw--w----"),
        ] {
            assert_eq!(permissions(mode), text, "{mode:o}");
        }
    }
}
