//! A streaming reader of `multipart/form-data` (RFC 7578).
//!
//! Memory use is one chunk of the connection plus a delimiter, whatever the sizes of the parts; the
//! headers of a part are bounded. File names are taken whole, with directories: they are paths here.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memmem;

/// Bytes of the headers of one part.
const HEADER_LIMIT: usize = 16 << 10;
const BOUNDARY_LIMIT: usize = 70;

/// The boundary of a `Content-Type: multipart/form-data` header.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let value = parameter(parameters.as_bytes(), "boundary")?;
    (1..=BOUNDARY_LIMIT).contains(&value.len()).then_some(value)
}

/// What the headers of a part say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub filename: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Part(Part),
    /// Content of the current part, never empty.
    Data(Bytes),
    /// The current part is complete.
    PartEnd,
    /// The closing delimiter was read.
    End,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Preamble,
    /// Right after a delimiter: line end or `--`.
    Delimiter,
    Headers,
    Content,
    Ended,
}

/// Turns bytes that arrive in pieces into events.
#[derive(Debug)]
pub struct Parser {
    delimiter: Vec<u8>,
    buffer: BytesMut,
    state: State,
}

impl Parser {
    pub fn new(boundary: &str) -> Parser {
        // The first delimiter has no line end before it; with this one it looks like the others.
        Parser {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            buffer: BytesMut::from("\r\n"),
            state: State::Preamble,
        }
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next event, or `None` if more bytes are needed.
    pub fn next(&mut self) -> Result<Option<Event>, String> {
        loop {
            match self.state {
                State::Preamble => match memmem::find(&self.buffer, &self.delimiter) {
                    Some(at) => {
                        self.buffer.advance(at + self.delimiter.len());
                        self.state = State::Delimiter;
                    }
                    None => {
                        self.buffer.advance(self.buffer.len() - self.tail());
                        return Ok(None);
                    }
                },
                State::Delimiter => {
                    // White space may follow a boundary.
                    let padding = self
                        .buffer
                        .iter()
                        .take_while(|b| matches!(b, b' ' | b'\t'))
                        .count();
                    self.buffer.advance(padding);
                    match &self.buffer[..] {
                        [b'-', b'-', ..] => {
                            self.state = State::Ended;
                            return Ok(Some(Event::End));
                        }
                        [b'\r', b'\n', ..] => {
                            // Left in place: a part without headers starts with an empty line.
                            self.state = State::Headers;
                        }
                        [] | [b'-'] | [b'\r'] => return Ok(None),
                        _ => {
                            return Err("a multipart boundary is followed by something else".into())
                        }
                    }
                }
                State::Headers => match memmem::find(&self.buffer, b"\r\n\r\n") {
                    Some(at) if at <= HEADER_LIMIT => {
                        let part = headers(&self.buffer[..at])?;
                        self.buffer.advance(at + 4);
                        self.state = State::Content;
                        return Ok(Some(Event::Part(part)));
                    }
                    None if self.buffer.len() <= HEADER_LIMIT => return Ok(None),
                    _ => {
                        return Err(format!(
                            "the headers of a part have more than {HEADER_LIMIT} bytes"
                        ))
                    }
                },
                State::Content => match memmem::find(&self.buffer, &self.delimiter) {
                    Some(0) => {
                        self.buffer.advance(self.delimiter.len());
                        self.state = State::Delimiter;
                        return Ok(Some(Event::PartEnd));
                    }
                    Some(at) => return Ok(Some(Event::Data(self.buffer.split_to(at).freeze()))),
                    None => {
                        let ready = self.buffer.len() - self.tail();
                        let data = self.buffer.split_to(ready).freeze();
                        return Ok((!data.is_empty()).then_some(Event::Data(data)));
                    }
                },
                State::Ended => {
                    // An epilogue is allowed and means nothing.
                    self.buffer.clear();
                    return Ok(None);
                }
            }
        }
    }

    pub fn ended(&self) -> bool {
        self.state == State::Ended
    }

    /// Bytes at the end of the buffer that may be the start of a delimiter.
    fn tail(&self) -> usize {
        let longest = self.buffer.len().min(self.delimiter.len() - 1);
        let start = self.buffer.len() - longest;
        let from = memchr::memchr_iter(b'\r', &self.buffer[start..])
            .map(|at| start + at)
            .find(|at| self.delimiter.starts_with(&self.buffer[*at..]));
        from.map_or(0, |at| self.buffer.len() - at)
    }
}

fn headers(block: &[u8]) -> Result<Part, String> {
    let mut part = Part::default();
    for line in block.split(|b| *b == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(colon) = memchr::memchr(b':', line) else {
            continue;
        };
        if !line[..colon]
            .trim_ascii()
            .eq_ignore_ascii_case(b"content-disposition")
        {
            continue;
        }
        let value = &line[colon + 1..];
        part.name = parameter(value, "name").unwrap_or_default();
        part.filename = parameter(value, "filename");
        if part.filename.is_none() && memmem::find(value, b"filename=").is_some() {
            return Err("the file name of a part is not UTF-8".into());
        }
    }
    Ok(part)
}

/// A parameter of a header value: a token or a quoted string. Browsers write quotes and line ends of
/// names as percent escapes, other clients use backslashes.
fn parameter(value: &[u8], wanted: &str) -> Option<String> {
    let mut rest = value;
    while !rest.is_empty() {
        let end = rest
            .iter()
            .position(|b| matches!(b, b';' | b'='))
            .unwrap_or(rest.len());
        let key = rest[..end].trim_ascii();
        rest = &rest[end..];
        if rest.first() != Some(&b'=') {
            rest = rest.get(1..).unwrap_or_default();
            continue;
        }
        rest = rest[1..].trim_ascii_start();
        let mut text = Vec::new();
        if rest.first() == Some(&b'"') {
            let mut at = 1;
            while at < rest.len() && rest[at] != b'"' {
                if rest[at] == b'\\' && matches!(rest.get(at + 1), Some(b'"' | b'\\')) {
                    at += 1;
                }
                text.push(rest[at]);
                at += 1;
            }
            rest = rest.get(at + 1..).unwrap_or_default();
        } else {
            let end = memchr::memchr(b';', rest).unwrap_or(rest.len());
            text.extend_from_slice(rest[..end].trim_ascii());
            rest = &rest[end..];
        }
        if key.eq_ignore_ascii_case(wanted.as_bytes()) {
            let unescape = |t: String| {
                t.replace("%22", "\"")
                    .replace("%0D", "\r")
                    .replace("%0A", "\n")
            };
            return String::from_utf8(text).ok().map(unescape);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(wire: &[u8], step: usize) -> Result<Vec<(Part, Vec<u8>)>, String> {
        let mut parser = Parser::new("XX");
        let mut parts: Vec<(Part, Vec<u8>)> = Vec::new();
        for piece in wire.chunks(step) {
            parser.feed(piece);
            while let Some(event) = parser.next()? {
                match event {
                    Event::Part(part) => parts.push((part, Vec::new())),
                    Event::Data(data) => parts.last_mut().unwrap().1.extend_from_slice(&data),
                    Event::PartEnd | Event::End => {}
                }
            }
        }
        if parser.ended() {
            Ok(parts)
        } else {
            Err("not ended".into())
        }
    }

    fn compose(parts: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut wire = b"preamble\r\n".to_vec();
        for (filename, content) in parts {
            let escaped = filename.replace('\\', "\\\\").replace('"', "%22");
            wire.extend(format!("--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{escaped}\"\r\nContent-Type: text/plain\r\n\r\n").bytes());
            wire.extend(content);
            wire.extend(b"\r\n");
        }
        wire.extend(b"--XX--\r\nepilogue");
        wire
    }

    #[test]
    fn boundaries_are_read_from_the_content_type() {
        assert_eq!(
            boundary("multipart/form-data; boundary=abc").as_deref(),
            Some("abc")
        );
        assert_eq!(
            boundary("Multipart/Form-Data; charset=x; Boundary=\"a;b\"").as_deref(),
            Some("a;b")
        );
        for bad in [
            "multipart/form-data",
            "text/plain; boundary=a",
            "multipart/form-data; boundary=",
            "multipart/mixed; boundary=a",
        ] {
            assert_eq!(boundary(bad), None, "{bad}");
        }
    }

    #[test]
    fn file_names_keep_directories_and_escapes() {
        let line = "Content-Disposition: form-data; name=file; filename=\"/a/b c/\u{e4}%22;\\\"x\"";
        let part = headers(line.as_bytes()).unwrap();
        assert_eq!(
            part,
            Part {
                name: "file".into(),
                filename: Some("/a/b c/\u{e4}\";\"x".into())
            }
        );
        let none = headers(b"content-disposition: form-data; name=\"file\"").unwrap();
        assert_eq!(
            none,
            Part {
                name: "file".into(),
                filename: None
            }
        );
        assert!(headers(b"content-disposition: form-data; name=a; filename=\"\xff\"").is_err());
    }

    #[test]
    fn parts_without_headers_or_content_are_parts() {
        assert_eq!(
            run(b"--XX\r\n\r\n\r\n--XX--", 1).unwrap(),
            [(Part::default(), vec![])]
        );
    }

    #[test]
    fn endless_headers_and_broken_delimiters_are_refused() {
        let mut wire = b"--XX\r\n".to_vec();
        wire.resize(HEADER_LIMIT * 2, b'h');
        assert!(run(&wire, 1000).is_err());
        assert!(run(b"--XXjunk\r\n\r\n", 100).is_err());
        assert!(run(b"--XX\r\n\r\nnever ended", 100).is_err());
    }

    proptest! {
        #[test]
        fn content_survives_any_split(
            parts in prop::collection::vec(("\\PC{0,12}", prop::collection::vec(prop::sample::select(&b"\r\n-Xa\0"[..]), 0..60)), 0..4),
            step in 1usize..40,
        ) {
            // Content that contains the delimiter is no valid input.
            prop_assume!(!parts.iter().any(|(name, content)| {
                memmem::find(&[b"\r\n", &content[..]].concat(), b"\r\n--XX").is_some()
                    || name.contains("%22") || name.contains("%0D") || name.contains("%0A")
            }));
            let got = run(&compose(&parts), step).unwrap();
            let got: Vec<_> = got.into_iter().map(|(part, content)| (part.filename.unwrap(), content)).collect();
            prop_assert_eq!(got, parts);
        }

        #[test]
        fn hostile_bytes_do_not_panic(wire in prop::collection::vec(prop::sample::select(&b"\r\n-X:;=\"\\ a"[..]), 0..200), step in 1usize..20) {
            let _ = run(&wire, step);
        }
    }
}
