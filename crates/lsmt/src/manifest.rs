//! Which file of an image plays which role.
//!
//! Data files are never renamed; an append-only file of checksummed records says what they are. Its state is a pure
//! function of its records ([`Roles::apply`]), so every crash leaves an earlier valid state: the first record that does not
//! fit its checksum and number ends the file.
//!
//! ```text
//! header 32 B: magic, random key, 0, CRC-32C
//! record: CRC-32C over key and the rest u32, payload bytes u32, number u64, payload
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::header::{u32_at, u64_at};
use crate::stack::MAX_LAYERS;
use crate::upper::sync_parent;

const MAGIC: &[u8; 8] = b"AENVMAN1";
const OBJECT: &str = "the manifest";
const HEADER: usize = 32;
const HEAD: usize = 16;
/// Longest name of a layer that is not ours, in bytes.
pub const MAX_NAME: usize = 4096;
/// Longest payload: a state with the most layers, all with the longest names.
const MAX_PAYLOAD: usize = (MAX_LAYERS + 1) * (MAX_NAME + 8);
/// Most bytes of manifest that are read.
const MAX_FILE: u64 = 256 << 20;
/// A longer manifest is rewritten when it is opened.
const REWRITE: u64 = 1 << 20;

/// A layer of an image, or what will become one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerRef {
    /// Somebody else's layer, under a name that means something to the caller: a digest, a path.
    Lower(String),
    /// An upper of this image that was frozen; its journal is still needed.
    Frozen(Uuid),
    /// An upper of this image that was sealed.
    Sealed(Uuid),
}

/// A change of roles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Everything at once; the first record.
    State(Roles),
    /// This file is the upper now, and the previous upper is frozen below it.
    Upper(Uuid),
    /// A frozen upper was sealed and is durable.
    Sealed(Uuid),
    /// Layers were replaced by others with the same content.
    Replaced {
        /// Position of the lowest that was replaced.
        first: u32,
        /// How many.
        count: u32,
        /// What is there instead.
        with: Vec<LayerRef>,
    },
}

/// What a manifest says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roles {
    /// Layers, bottom first.
    pub layers: Vec<LayerRef>,
    /// The writable upper.
    pub upper: Option<Uuid>,
}

impl Roles {
    /// Changes the roles, or refuses an event that does not fit them and changes nothing.
    pub fn apply(&mut self, event: &Event) -> Result<()> {
        let wrong = |reason: String| Err(Error::format(OBJECT, reason));
        match event {
            Event::State(roles) => *self = roles.clone(),
            Event::Upper(uuid) => {
                if self.upper == Some(*uuid) || self.layers.iter().any(|l| l.uuid() == Some(*uuid))
                {
                    return wrong(format!(
                        "{uuid} cannot become the upper, it has a role already"
                    ));
                }
                if let Some(old) = self.upper.replace(*uuid) {
                    self.layers.push(LayerRef::Frozen(old));
                }
            }
            Event::Sealed(uuid) => match self
                .layers
                .iter_mut()
                .find(|l| **l == LayerRef::Frozen(*uuid))
            {
                Some(layer) => *layer = LayerRef::Sealed(*uuid),
                None => return wrong(format!("{uuid} was sealed, but it is not a frozen layer")),
            },
            Event::Replaced { first, count, with } => {
                let range = *first as usize..(*first as usize).saturating_add(*count as usize);
                match self.layers.get(range.clone()) {
                    Some(old) if old.iter().all(|l| !matches!(l, LayerRef::Frozen(_))) => {
                        self.layers.splice(range, with.iter().cloned());
                    }
                    _ => {
                        return wrong(format!(
                            "layers {range:?} of {} cannot be replaced",
                            self.layers.len()
                        ))
                    }
                }
            }
        }
        Ok(())
    }
}

impl LayerRef {
    /// The id, if it is a file of this image.
    pub fn uuid(&self) -> Option<Uuid> {
        match self {
            LayerRef::Lower(_) => None,
            LayerRef::Frozen(uuid) | LayerRef::Sealed(uuid) => Some(*uuid),
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let (kind, bytes) = match self {
            LayerRef::Lower(name) => (0, name.as_bytes()),
            LayerRef::Frozen(uuid) => (1, &uuid.as_bytes()[..]),
            LayerRef::Sealed(uuid) => (2, &uuid.as_bytes()[..]),
        };
        out.push(kind);
        out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
        out.extend_from_slice(bytes);
    }
}

fn encode_layers(layers: &[LayerRef], out: &mut Vec<u8>) {
    out.extend_from_slice(&(layers.len() as u16).to_le_bytes());
    layers.iter().for_each(|layer| layer.encode(out));
}

impl Event {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Event::State(roles) => {
                out.push(0);
                encode_layers(&roles.layers, &mut out);
                out.push(u8::from(roles.upper.is_some()));
                out.extend_from_slice(roles.upper.unwrap_or_default().as_bytes());
            }
            Event::Upper(uuid) => {
                out.push(1);
                out.extend_from_slice(uuid.as_bytes());
            }
            Event::Sealed(uuid) => {
                out.push(2);
                out.extend_from_slice(uuid.as_bytes());
            }
            Event::Replaced { first, count, with } => {
                out.push(3);
                out.extend_from_slice(&first.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
                encode_layers(with, &mut out);
            }
        }
        out
    }

    fn decode(payload: &[u8]) -> Option<Event> {
        let mut rest = Rest(payload);
        let event = match rest.number::<1>()? {
            0 => {
                let layers = rest.layers()?;
                let present = rest.number::<1>()? == 1;
                let uuid = rest.uuid()?;
                Event::State(Roles {
                    layers,
                    upper: present.then_some(uuid),
                })
            }
            1 => Event::Upper(rest.uuid()?),
            2 => Event::Sealed(rest.uuid()?),
            3 => Event::Replaced {
                first: rest.number::<4>()? as u32,
                count: rest.number::<4>()? as u32,
                with: rest.layers()?,
            },
            _ => return None,
        };
        rest.0.is_empty().then_some(event)
    }

    fn check(&self) -> Result<()> {
        let layers = match self {
            Event::State(roles) => &roles.layers,
            Event::Replaced { with, .. } => with,
            _ => return Ok(()),
        };
        let long =
            |layer: &LayerRef| matches!(layer, LayerRef::Lower(name) if name.len() > MAX_NAME);
        if layers.len() > MAX_LAYERS || layers.iter().any(long) {
            return Err(Error::Argument(format!(
                "at most {MAX_LAYERS} layers with names of at most {MAX_NAME} bytes"
            )));
        }
        Ok(())
    }
}

/// Bytes not yet decoded.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn number<const N: usize>(&mut self) -> Option<u64> {
        let bytes = self.take(N)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |number, byte| number << 8 | u64::from(*byte)),
        )
    }

    fn uuid(&mut self) -> Option<Uuid> {
        Uuid::from_slice(self.take(16)?).ok()
    }

    fn layers(&mut self) -> Option<Vec<LayerRef>> {
        let count = self.number::<2>()?;
        (0..count)
            .map(|_| {
                let kind = self.number::<1>()?;
                let length = self.number::<2>()? as usize;
                let bytes = self.take(length)?;
                Some(match kind {
                    0 => LayerRef::Lower(String::from_utf8(bytes.to_vec()).ok()?),
                    1 => LayerRef::Frozen(Uuid::from_slice(bytes).ok()?),
                    2 => LayerRef::Sealed(Uuid::from_slice(bytes).ok()?),
                    _ => return None,
                })
            })
            .collect()
    }
}

/// An open manifest. For one thread at a time.
#[derive(Debug)]
pub struct Manifest {
    path: PathBuf,
    file: File,
    key: u64,
    roles: Roles,
    end: u64,
    number: u64,
    /// Records were written that may not be on stable storage.
    dirty: bool,
    /// The file itself may not be, by its name.
    fresh: bool,
}

impl Manifest {
    /// Creates a manifest; nothing must be there. Without `durable` it survives the process at once, and the machine
    /// after the first [`Manifest::sync`].
    pub fn create(path: &Path, roles: Roles, durable: bool) -> Result<Manifest> {
        let event = Event::State(roles.clone());
        event.check()?;
        let key = Uuid::new_v4().as_u64_pair().1;
        let mut bytes = header(key).to_vec();
        encode(key, 0, &event, &mut bytes);
        let run = || -> io::Result<File> {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(path)?;
            file.write_all_at(&bytes, 0)?;
            Ok(file)
        };
        let file = run().map_err(Error::io(format_args!("create {}", path.display())))?;
        let mut manifest = Manifest {
            path: path.to_owned(),
            file,
            key,
            roles,
            end: bytes.len() as u64,
            number: 0,
            dirty: true,
            fresh: true,
        };
        if durable {
            manifest.sync()?;
        }
        Ok(manifest)
    }

    /// Opens a manifest and cuts off what a crash left at its end. Returns the number of bytes cut, too.
    pub fn open(path: &Path) -> Result<(Manifest, u64)> {
        let read = || -> io::Result<(File, Vec<u8>)> {
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            let mut bytes = Vec::new();
            (&file).take(MAX_FILE + 1).read_to_end(&mut bytes)?;
            Ok((file, bytes))
        };
        let (file, bytes) = read().map_err(Error::io(format_args!("read {}", path.display())))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(Error::format(
                OBJECT,
                format!("it has more than {MAX_FILE} bytes"),
            ));
        }
        let (key, roles, number, end) = parse(&bytes)?;
        let cut = bytes.len() as u64 - end;
        if end > REWRITE {
            let fresh = path.with_extension("new");
            if fresh.exists() {
                std::fs::remove_file(&fresh)
                    .map_err(Error::io(format_args!("remove {}", fresh.display())))?;
            }
            let mut manifest = Manifest::create(&fresh, roles, true)?;
            std::fs::rename(&fresh, path)
                .and_then(|()| sync_parent(path))
                .map_err(Error::io(format_args!("replace {}", path.display())))?;
            manifest.path = path.to_owned();
            return Ok((manifest, cut));
        }
        file.set_len(end)
            .map_err(Error::io(format_args!("cut {}", path.display())))?;
        Ok((
            Manifest {
                path: path.to_owned(),
                file,
                key,
                roles,
                end,
                number,
                dirty: true,
                fresh: true,
            },
            cut,
        ))
    }

    /// Current roles.
    pub fn roles(&self) -> &Roles {
        &self.roles
    }

    /// Records an event. It survives the process at once, the machine after [`Manifest::sync`].
    pub fn record(&mut self, event: &Event) -> Result<()> {
        event.check()?;
        let mut roles = self.roles.clone();
        roles.apply(event)?;
        let mut bytes = Vec::new();
        encode(self.key, self.number + 1, event, &mut bytes);
        self.file
            .write_all_at(&bytes, self.end)
            .map_err(Error::io(format_args!("write {}", self.path.display())))?;
        self.roles = roles;
        self.end += bytes.len() as u64;
        self.number += 1;
        self.dirty = true;
        Ok(())
    }

    /// Makes everything recorded durable.
    pub fn sync(&mut self) -> Result<()> {
        let run = || -> io::Result<()> {
            if self.dirty {
                self.file.sync_data()?;
            }
            if self.fresh {
                sync_parent(&self.path)?;
            }
            Ok(())
        };
        run().map_err(Error::io(format_args!("flush {}", self.path.display())))?;
        (self.dirty, self.fresh) = (false, false);
        Ok(())
    }
}

fn header(key: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&key.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..28]);
    bytes[28..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn crc(key: u64, body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&key.to_le_bytes()), body)
}

fn encode(key: u64, number: u64, event: &Event, out: &mut Vec<u8>) {
    let payload = event.encode();
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&number.to_le_bytes());
    out.extend_from_slice(&payload);
    let crc = crc(key, &out[start + 4..]);
    out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Key, roles, number of the last record and end of the part that is intact.
fn parse(bytes: &[u8]) -> Result<(u64, Roles, u64, u64)> {
    let head = bytes
        .get(..HEADER)
        .filter(|h| h[..8] == *MAGIC && u32_at(h, 28) == crc32c::crc32c(&h[..28]));
    let Some(head) = head else {
        return Err(Error::format(
            OBJECT,
            "its header has a wrong magic number or checksum",
        ));
    };
    let key = u64_at(head, 8);
    let mut roles = None;
    let (mut at, mut number) = (HEADER, 0);
    while let Some(head) = bytes.get(at..at + HEAD) {
        let length = u32_at(head, 4) as usize;
        let Some(body) = bytes.get(at + 4..at + HEAD + length.min(MAX_PAYLOAD)) else {
            break;
        };
        if crc(key, body) != u32_at(head, 0) || u64_at(head, 8) != number {
            break;
        }
        let event = Event::decode(&body[HEAD - 4..]).ok_or_else(|| {
            Error::unsupported(OBJECT, format!("record {number} is from a newer version"))
        })?;
        roles.get_or_insert_with(Roles::default).apply(&event)?;
        number += 1;
        at += HEAD + length;
    }
    let roles = roles.ok_or_else(|| Error::format(OBJECT, "it has no intact record"))?;
    Ok((key, roles, number - 1, at as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    /// A life of an image: two lowers, uppers 1 to 4, a merge.
    fn events() -> Vec<Event> {
        let lowers = ["sha256:aaaa", "sha256:bbbb"].map(|name| LayerRef::Lower(name.into()));
        vec![
            Event::State(Roles {
                layers: lowers.to_vec(),
                upper: Some(id(1)),
            }),
            Event::Upper(id(2)),
            Event::Sealed(id(1)),
            Event::Upper(id(3)),
            Event::Upper(id(4)),
            Event::Replaced {
                first: 1,
                count: 2,
                with: vec![LayerRef::Lower("merged".into())],
            },
            Event::Sealed(id(2)),
            Event::Sealed(id(3)),
        ]
    }

    fn states() -> Vec<Roles> {
        let mut roles = Roles::default();
        let apply = |event| {
            roles.apply(&event).unwrap();
            roles.clone()
        };
        events().into_iter().map(apply).collect()
    }

    #[test]
    fn roles_follow_the_life_of_an_image() {
        let last = states().pop().unwrap();
        let lower = |name: &str| LayerRef::Lower(name.into());
        let layers = vec![
            lower("sha256:aaaa"),
            lower("merged"),
            LayerRef::Sealed(id(2)),
            LayerRef::Sealed(id(3)),
        ];
        assert_eq!(
            last,
            Roles {
                layers,
                upper: Some(id(4))
            }
        );
    }

    #[test]
    fn events_that_do_not_fit_change_nothing() {
        let roles = states()[4].clone();
        let refused = [
            Event::Upper(id(4)),
            Event::Upper(id(3)),
            Event::Upper(id(1)),
            Event::Sealed(id(1)),
            Event::Sealed(id(9)),
            Event::Replaced {
                first: 2,
                count: 2,
                with: vec![],
            },
            Event::Replaced {
                first: 4,
                count: 2,
                with: vec![],
            },
            Event::Replaced {
                first: u32::MAX,
                count: u32::MAX,
                with: vec![],
            },
        ];
        for event in refused {
            let mut copy = roles.clone();
            assert!(copy.apply(&event).is_err(), "{event:?}");
            assert_eq!(copy, roles);
        }
    }

    #[test]
    fn a_manifest_cut_or_damaged_anywhere_gives_an_earlier_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest");
        let mut events = events().into_iter();
        let Some(Event::State(first)) = events.next() else {
            unreachable!()
        };
        let mut manifest = Manifest::create(&path, first, true).unwrap();
        let mut ends = vec![manifest.end];
        for event in events {
            manifest.record(&event).unwrap();
            ends.push(manifest.end);
        }
        manifest.sync().unwrap();
        assert!(
            manifest.record(&Event::Sealed(id(77))).is_err(),
            "what does not fit is not recorded"
        );
        let bytes = std::fs::read(&path).unwrap();
        let states = states();
        for cut in 0..=bytes.len() {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let whole = ends.iter().filter(|end| **end <= cut as u64).count();
            match Manifest::open(&path) {
                Ok((manifest, torn)) => {
                    assert_eq!(*manifest.roles(), states[whole - 1]);
                    assert_eq!(torn, cut as u64 - ends[whole - 1]);
                }
                Err(_) => assert_eq!(whole, 0),
            }
        }
        for at in HEADER..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            std::fs::write(&path, &damaged).unwrap();
            let whole = ends.iter().filter(|end| **end <= at as u64).count();
            match Manifest::open(&path) {
                Ok((manifest, _)) => assert_eq!(*manifest.roles(), states[whole - 1]),
                Err(_) => assert_eq!(whole, 0),
            }
        }
        // After a repair the manifest goes on.
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let (mut manifest, _) = Manifest::open(&path).unwrap();
        manifest.record(&Event::Sealed(id(3))).unwrap();
        drop(manifest);
        assert_eq!(
            Manifest::open(&path).unwrap().0.roles(),
            states.last().unwrap()
        );
    }

    #[test]
    fn a_long_manifest_is_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest");
        let mut manifest = Manifest::create(
            &path,
            Roles {
                layers: vec![],
                upper: Some(id(0)),
            },
            true,
        )
        .unwrap();
        let name = "n".repeat(MAX_NAME);
        for n in 1..300 {
            manifest.record(&Event::Upper(id(n))).unwrap();
            manifest.record(&Event::Sealed(id(n - 1))).unwrap();
            let with = vec![LayerRef::Lower(name.clone())];
            let count = manifest.roles().layers.len() as u32;
            manifest
                .record(&Event::Replaced {
                    first: 0,
                    count,
                    with,
                })
                .unwrap();
        }
        let roles = manifest.roles().clone();
        assert!(manifest.end > REWRITE);
        drop(manifest);
        let (mut manifest, cut) = Manifest::open(&path).unwrap();
        assert_eq!((manifest.roles(), cut), (&roles, 0));
        assert!(std::fs::metadata(&path).unwrap().len() < 10_000);
        manifest.record(&Event::Upper(id(1000))).unwrap();
        let roles = manifest.roles().clone();
        drop(manifest);
        assert_eq!(*Manifest::open(&path).unwrap().0.roles(), roles);
        let long = Event::Replaced {
            first: 0,
            count: 0,
            with: vec![LayerRef::Lower("x".repeat(MAX_NAME + 1))],
        };
        assert!(Manifest::open(&path).unwrap().0.record(&long).is_err());
    }
}
