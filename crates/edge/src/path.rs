//! Which paths of the guest agent are internal.

/// First path segments on the agent's port that only the control plane may call.
const INTERNAL: [&[u8]; 8] = [
    b"init",
    b"shutdown",
    b"freeze",
    b"unfreeze",
    b"collapse",
    b"fsfreeze",
    b"fsthaw",
    b"upgrade",
];

/// Rounds of percent decoding before a path is refused. The bound keeps the work linear in the length of the path.
const MAX_DECODING: usize = 4;

/// True when `path` (the path of a request target, without query) could reach an internal route of the agent.
///
/// The agent compares paths as they are, so most disguises would miss there too. This errs on the side of refusal
/// all the same: it decodes percent signs until nothing is left to decode, takes `\` for `/`, ignores case and path
/// parameters, resolves dots, and then looks at the first segment. Nobody honest encodes a path more than
/// [`MAX_DECODING`] times, so such a path counts as internal.
pub fn is_internal(path: &str) -> bool {
    match normalise(path) {
        Some(segments) => segments
            .first()
            .is_some_and(|first| INTERNAL.contains(&first.as_slice())),
        None => true,
    }
}

/// The segments of a path after everything that could disguise them is undone; `None` when it is encoded too often.
pub fn normalise(path: &str) -> Option<Vec<Vec<u8>>> {
    let mut bytes = path.as_bytes().to_vec();
    let mut rounds = 0;
    loop {
        let decoded = percent_decode(&bytes);
        if decoded.len() == bytes.len() {
            break;
        }
        rounds += 1;
        if rounds > MAX_DECODING {
            return None;
        }
        bytes = decoded;
    }
    let mut segments: Vec<Vec<u8>> = Vec::new();
    for segment in bytes.split(|b| matches!(b, b'/' | b'\\')) {
        let end = segment
            .iter()
            .position(|b| matches!(b, b';' | b'?' | b'#' | 0))
            .unwrap_or(segment.len());
        let segment: Vec<u8> = segment[..end]
            .iter()
            .filter(|b| !b.is_ascii_whitespace())
            .map(u8::to_ascii_lowercase)
            .collect();
        match segment.as_slice() {
            b"" | b"." => {}
            b".." => {
                segments.pop();
            }
            _ => segments.push(segment),
        }
    }
    Some(segments)
}

fn percent_decode(bytes: &[u8]) -> Vec<u8> {
    let digit = |b: Option<&u8>| b.and_then(|b| (*b as char).to_digit(16));
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match (
            bytes[at],
            digit(bytes.get(at + 1)),
            digit(bytes.get(at + 2)),
        ) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, _, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn disguises_are_seen_through() {
        for path in [
            "/init",
            "//init",
            "/./init",
            "/init/",
            "/init/x",
            "/INIT",
            "/%69nit",
            "/%2569nit",
            "/%25252569nit",
            "/files/%25252525252525252525",
            "/a/../init",
            "/a/%2e%2e/init",
            "/a/..%2finit",
            "/../../init",
            "\\init",
            "/%5cinit",
            "/init;x=y",
            "/init%3Fx",
            "/init%00",
            "/init%20",
            "/;a/init",
            "/shutdown",
            "/fsfreeze",
            "/upgrade",
        ] {
            assert!(is_internal(path), "{path}");
        }
    }

    #[test]
    fn ordinary_paths_pass() {
        for path in [
            "/",
            "",
            "*",
            "/health",
            "/files",
            "/initial",
            "/xinit",
            "/files/init",
            "/process.Process/Start",
            "/%",
            "/%zz",
            "/init/../files",
        ] {
            assert!(!is_internal(path), "{path}");
        }
    }

    /// One way a client may write a character.
    fn disguised(text: &'static str) -> impl Strategy<Value = String> {
        let one = |c: char| {
            prop_oneof![
                Just(c.to_string()),
                Just(c.to_ascii_uppercase().to_string()),
                Just(format!("%{:02x}", c as u32)),
                Just(format!("%{:02X}", c.to_ascii_uppercase() as u32)),
                Just(format!("%25{:02x}", c as u32)),
            ]
        };
        text.chars()
            .map(one)
            .collect::<Vec<_>>()
            .prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn never_panics_and_is_stable(path in "\\PC{0,64}") {
            for segment in normalise(&path).iter().flatten() {
                prop_assert!(!segment.is_empty() && !segment.contains(&b'/'));
            }
            is_internal(&path);
        }

        #[test]
        fn every_disguise_of_an_internal_route_is_refused(
            lead in prop::collection::vec(prop::sample::select(vec!["/", "//", "/./", "/x/../", "/%2e/", "\\", "/%2f"]), 1..4),
            name in disguised("init"),
            tail in prop::sample::select(vec!["", "/", "/x", "//", ";a", "%2f"]),
        ) {
            let path = format!("{}{name}{tail}", lead.concat());
            prop_assert!(is_internal(&path), "{}", path);
        }
    }
}
