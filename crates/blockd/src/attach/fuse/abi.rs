//! The part of the kernel's FUSE protocol (version 7.31 and later) that block images need.
//!
//! Messages are C structures in native byte order. Requests are decoded by [`Request::decode`], answers are written
//! field by field with [`Out`]; neither needs unsafe code.

/// Protocol version we speak. The kernel adapts to a lower minor version by itself.
pub const MAJOR: u32 = 7;
pub const MINOR: u32 = 41;
/// Oldest minor version that has everything we cannot do without: `INIT` with `max_pages`.
pub const MIN_MINOR: u32 = 28;

/// Bytes of the header of a request.
pub const IN_HEADER: usize = 40;
/// Bytes of the header of an answer.
pub const OUT_HEADER: usize = 16;
/// Bytes before the payload of a `WRITE` request.
pub const WRITE_HEADER: usize = IN_HEADER + 40;
/// Node number of the directory.
pub const ROOT: u64 = 1;

/// Bits of the flags of `INIT`; the upper half travels in a field of its own.
pub mod init {
    pub const ASYNC_READ: u64 = 1;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Flags of an answer to `OPEN`.
pub mod open {
    pub const DIRECT_IO: u32 = 1;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const NO_FLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Bits of `SETATTR` that say which fields are meant.
pub mod set {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
}

/// Codes of messages that the server starts. They travel in the error field, with a unique id of 0.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const RESEND: i32 = 7;
}

/// A decoded request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Id to repeat in the answer, as it came: the kernel marks requests it sends again in it.
    pub unique: u64,
    /// File the request is about.
    pub node: u64,
    /// What is asked.
    pub op: Op<'a>,
}

/// What the kernel asks.
#[derive(Debug, PartialEq, Eq)]
pub enum Op<'a> {
    Init {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u64,
    },
    Destroy,
    Lookup {
        name: &'a [u8],
    },
    /// `FORGET`, `BATCH_FORGET` and `INTERRUPT`: nothing to do and no answer allowed.
    Silent,
    GetAttr,
    SetAttr {
        valid: u32,
        size: u64,
    },
    Open,
    OpenDir,
    /// `RELEASE`, `RELEASEDIR` and `FLUSH`: answered with success.
    Close,
    Read {
        offset: u64,
        size: u32,
    },
    Write {
        offset: u64,
        data: &'a [u8],
    },
    Sync,
    Fallocate {
        offset: u64,
        len: u64,
        mode: u32,
    },
    Seek {
        offset: u64,
        whence: u32,
    },
    ReadDir {
        offset: u64,
        size: u32,
    },
    StatFs,
    /// Creating, removing, linking or renaming files.
    Change,
    /// Anything else, answered with `ENOSYS`; the kernel then stops asking.
    Unknown,
}

/// The opcode of a message that is too short to be one, or shorter than its opcode demands.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Id to answer with `EIO`; 0 if there is not even a header.
    pub unique: u64,
}

impl<'a> Request<'a> {
    /// Decodes what one `read` of the device returned.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let header = bytes.get(..IN_HEADER).ok_or(Malformed { unique: 0 })?;
        let unique = u64_at(header, 8);
        let node = u64_at(header, 16);
        let op = decode_op(u32_at(header, 4), &bytes[IN_HEADER..]).ok_or(Malformed { unique })?;
        Ok(Request { unique, node, op })
    }
}

fn decode_op(opcode: u32, body: &[u8]) -> Option<Op<'_>> {
    let body_of = |len: usize| body.get(..len);
    Some(match opcode {
        1 => Op::Lookup {
            name: body.split(|b| *b == 0).next()?,
        },
        2 | 36 | 42 => Op::Silent,
        3 => Op::GetAttr,
        4 => {
            let b = body_of(88)?;
            Op::SetAttr {
                valid: u32_at(b, 0),
                size: u64_at(b, 16),
            }
        }
        6 | 8..=13 | 35 | 45 => Op::Change,
        14 => Op::Open,
        15 => {
            let b = body_of(40)?;
            Op::Read {
                offset: u64_at(b, 8),
                size: u32_at(b, 16),
            }
        }
        16 => {
            let b = body_of(40)?;
            Op::Write {
                offset: u64_at(b, 8),
                data: body[40..].get(..u32_at(b, 16) as usize)?,
            }
        }
        17 => Op::StatFs,
        18 | 25 | 29 => Op::Close,
        20 | 30 => Op::Sync,
        26 => {
            let b = body_of(16)?;
            let low = u64::from(u32_at(b, 12));
            let high = match body.get(16..20) {
                Some(b) if low & init::INIT_EXT != 0 => u64::from(u32_at(b, 0)),
                _ => 0,
            };
            Op::Init {
                major: u32_at(b, 0),
                minor: u32_at(b, 4),
                max_readahead: u32_at(b, 8),
                flags: high << 32 | low,
            }
        }
        27 => Op::OpenDir,
        28 => {
            let b = body_of(40)?;
            Op::ReadDir {
                offset: u64_at(b, 8),
                size: u32_at(b, 16),
            }
        }
        38 => Op::Destroy,
        43 => {
            let b = body_of(32)?;
            Op::Fallocate {
                offset: u64_at(b, 8),
                len: u64_at(b, 16),
                mode: u32_at(b, 24),
            }
        }
        46 => {
            let b = body_of(24)?;
            Op::Seek {
                offset: u64_at(b, 8),
                whence: u32_at(b, 16),
            }
        }
        _ => Op::Unknown,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Writes the fields of an answer one after another into a buffer. Answers that would not fit are cut; the buffer is
/// larger than any of them.
pub struct Out<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> Out<'a> {
    /// Starts at the beginning of `buf`.
    pub fn new(buf: &'a mut [u8]) -> Out<'a> {
        Out { buf, len: 0 }
    }

    /// Bytes written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        let len = bytes.len().min(self.buf.len() - self.len);
        self.buf[self.len..self.len + len].copy_from_slice(&bytes[..len]);
        self.len += len;
        self
    }

    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_ne_bytes())
    }

    pub fn zeros(&mut self, count: usize) -> &mut Self {
        for _ in 0..count {
            self.bytes(&[0]);
        }
        self
    }

    /// `struct fuse_attr`.
    pub fn attr(&mut self, attr: &Attr) -> &mut Self {
        self.u64(attr.node)
            .u64(attr.size)
            .u64(attr.size.div_ceil(512));
        self.u64(attr.time).u64(attr.time).u64(attr.time);
        self.u32(0).u32(0).u32(0);
        self.u32(attr.mode).u32(1).u32(attr.uid).u32(attr.gid);
        self.u32(0).u32(4096).u32(0)
    }

    /// `struct fuse_attr_out`.
    pub fn attr_out(&mut self, attr: &Attr) -> &mut Self {
        self.u64(VALID_SECONDS).u32(0).u32(0).attr(attr)
    }

    /// `struct fuse_entry_out`.
    pub fn entry_out(&mut self, attr: &Attr) -> &mut Self {
        self.u64(attr.node).u64(0);
        self.u64(VALID_SECONDS).u64(VALID_SECONDS).u32(0).u32(0);
        self.attr(attr)
    }

    /// `struct fuse_open_out`.
    pub fn open_out(&mut self, flags: u32) -> &mut Self {
        self.u64(0).u32(flags).u32(0)
    }

    /// `struct fuse_init_out`.
    pub fn init_out(&mut self, answer: &Negotiated) -> &mut Self {
        self.u32(MAJOR).u32(MINOR);
        self.u32(answer.max_readahead).u32(answer.flags as u32);
        self.u16(answer.max_background)
            .u16(answer.max_background / 4 * 3);
        self.u32(answer.max_write).u32(1);
        self.u16((answer.max_write / 4096) as u16).u16(0);
        self.u32((answer.flags >> 32) as u32).u32(0);
        self.zeros(6 * 4)
    }
}

/// How long the kernel may believe names and attributes. They change only when we say so.
const VALID_SECONDS: u64 = 365 * 86400;

/// Attributes of a file.
#[derive(Debug, Clone, Copy)]
pub struct Attr {
    pub node: u64,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub time: u64,
}

/// What server and kernel agreed on. It holds as long as the mount, longer than the daemon that agreed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Negotiated {
    /// Minor version of the protocol the kernel speaks.
    pub minor: u32,
    /// Flags both sides have, see [`init`].
    pub flags: u64,
    /// Most bytes of a `WRITE`, and of a `READ`.
    pub max_write: u32,
    /// Most bytes the kernel reads ahead.
    pub max_readahead: u32,
    /// Most asynchronous requests under way.
    pub max_background: u16,
}

impl Negotiated {
    /// Answers the kernel's offer.
    pub fn choose(minor: u32, max_readahead: u32, offered: u64) -> Negotiated {
        let wanted = init::ASYNC_READ
            | init::BIG_WRITES
            | init::ASYNC_DIO
            | init::PARALLEL_DIROPS
            | init::MAX_PAGES
            | init::INIT_EXT
            | init::DIRECT_IO_ALLOW_MMAP
            | init::HAS_RESEND;
        Negotiated {
            minor,
            flags: offered & wanted,
            max_write: super::MAX_IO as u32,
            max_readahead,
            max_background: 256,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut m = Vec::new();
        m.extend(((IN_HEADER + body.len()) as u32).to_ne_bytes());
        m.extend(opcode.to_ne_bytes());
        m.extend(77u64.to_ne_bytes());
        m.extend(5u64.to_ne_bytes());
        m.extend([0; 16]);
        m.extend(body);
        m
    }

    #[test]
    fn requests_are_decoded() {
        let mut body = Vec::new();
        for field in [9u64, 4096, 3, 0, 0] {
            body.extend(field.to_ne_bytes());
        }
        body.extend(b"abc");
        let m = message(16, &body);
        let request = Request::decode(&m).unwrap();
        assert_eq!((request.unique, request.node), (77, 5));
        assert_eq!(
            request.op,
            Op::Write {
                offset: 4096,
                data: b"abc"
            }
        );
        let m = message(1, b"name\0");
        assert_eq!(
            Request::decode(&m).unwrap().op,
            Op::Lookup { name: b"name" }
        );
    }

    #[test]
    fn short_messages_are_refused_whatever_their_opcode() {
        for opcode in 0..60 {
            for len in 0..48 {
                // Must not panic; a write must never see more bytes than came.
                if let Ok(Request {
                    op: Op::Write { data, .. },
                    ..
                }) = Request::decode(&message(opcode, &vec![0xff; len]))
                {
                    assert!(data.len() <= len);
                }
            }
        }
        assert_eq!(Request::decode(&[0; 39]), Err(Malformed { unique: 0 }));
        assert_eq!(
            Request::decode(&message(15, &[0; 39])),
            Err(Malformed { unique: 77 })
        );
    }

    #[test]
    fn answers_have_the_sizes_of_the_protocol() {
        let attr = Attr {
            node: 2,
            size: 1,
            mode: 0o100600,
            uid: 0,
            gid: 0,
            time: 0,
        };
        let mut buf = [0; 256];
        assert_eq!(Out::new(&mut buf).attr_out(&attr).len(), 104);
        assert_eq!(Out::new(&mut buf).entry_out(&attr).len(), 128);
        assert_eq!(Out::new(&mut buf).open_out(0).len(), 16);
        let answer = Negotiated::choose(41, 0, u64::MAX);
        assert_eq!(Out::new(&mut buf).init_out(&answer).len(), 64);
    }
}
