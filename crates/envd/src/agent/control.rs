//! Calls of the control plane: `POST /init`, `POST /freeze` and `POST /shutdown`.

use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderValue, CONNECTION};
use hyper::{Request, Response, StatusCode};
use rustix::fs::{open, Mode, OFlags};
use rustix::process::{kill_process, Pid, Signal};
use rustix::time::{clock_settime, ClockId, Timespec};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use time::format_description::well_known::Rfc3339;
use time::OffsetDateTime;

use super::connect::{collect, MESSAGE_LIMIT};
use super::http::{self, Body};
use super::identity::{Identity, Init};
use super::kernel::Guest;
use super::{token, wire, Agent};
use crate::sys::names;

const CONTROL_HEADER: &str = "x-aenv-control";
/// Entropy taken at once, in bytes.
const ENTROPY: std::ops::RangeInclusive<usize> = 32..=4096;
/// Clock differences below this are left alone, in nanoseconds: the message itself takes time.
const CLOCK_TOLERANCE: i128 = 10_000_000;

/// How long `POST /init` waits for what touches the disk.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

type Refusal = Box<Response<Body>>;

fn refuse(status: StatusCode, message: &str) -> Refusal {
    Box::new(http::error(status, message))
}

/// Checks the control token. The first one since boot is taken; `None` then asks to keep it.
fn authorize(
    identity: &Identity,
    headers: &HeaderMap,
    may_claim: bool,
) -> Result<Option<String>, Refusal> {
    let given = headers
        .get(CONTROL_HEADER)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    if given.is_empty() {
        return Err(refuse(
            StatusCode::UNAUTHORIZED,
            "the header X-Aenv-Control is missing",
        ));
    }
    if identity.control_token.is_empty() && may_claim {
        return Ok(Some(given.to_owned()));
    }
    if !token::equal(given.as_bytes(), identity.control_token.as_bytes()) {
        return Err(refuse(
            StatusCode::UNAUTHORIZED,
            "the header X-Aenv-Control does not match",
        ));
    }
    Ok(None)
}

pub async fn init(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    match try_init(&agent, request).await {
        Ok(()) => http::empty(StatusCode::NO_CONTENT),
        Err(refusal) => *refusal,
    }
}

async fn try_init(agent: &Arc<Agent>, request: Request<Incoming>) -> Result<(), Refusal> {
    let (parts, body) = request.into_parts();
    authorize(&agent.identity(), &parts.headers, true)?;
    let body = collect(body, MESSAGE_LIMIT)
        .await
        .map_err(|e| refuse(StatusCode::BAD_REQUEST, &e.message))?;
    let bad = |message: String| refuse(StatusCode::BAD_REQUEST, &message);
    let init: Init = match body.is_empty() {
        true => Init::default(),
        false => serde_json::from_slice(&body)
            .map_err(|e| bad(format!("the body is not a valid message: {e}")))?,
    };
    Identity::check(&init).map_err(bad)?;
    let clock = init
        .timestamp
        .as_deref()
        .map(parse_clock)
        .transpose()
        .map_err(bad)?;
    let entropy = init
        .entropy
        .as_deref()
        .map(parse_entropy)
        .transpose()
        .map_err(bad)?;

    {
        // Checked again under the lock: of two first calls only one may win, and only it has effects.
        let mut identity = agent
            .identity
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let claimed = authorize(&identity, &parts.headers, true)?;
        let mut next = identity.clone();
        next.apply(&init);
        if let Some(token) = claimed {
            next.control_token = token;
        }
        if let Some(guest) = &agent.kernel.guest {
            change(
                guest,
                &next,
                entropy.as_deref(),
                clock,
                init.hostname.as_deref(),
            )
            .map_err(|message| refuse(StatusCode::INTERNAL_SERVER_ERROR, &message))?;
        }
        *identity = next;
    }
    let agent = agent.clone();
    let work = tokio::task::spawn_blocking(move || settle(&agent, init.hostname.as_deref()));
    // These touch the user's disk, on which anything may be mounted; they go on if they take longer.
    let _ = tokio::time::timeout(SETTLE_LIMIT, work).await;
    Ok(())
}

/// Changes the machine: its random generator, clock and name. User code runs again as the last step.
fn change(
    guest: &Guest,
    identity: &Identity,
    entropy: Option<&[u8]>,
    clock: Option<OffsetDateTime>,
    name: Option<&str>,
) -> Result<(), String> {
    entropy.map_or(Ok(()), |entropy| reseed(&guest.random, entropy))?;
    clock.map_or(Ok(()), set_clock)?;
    name.map_or(Ok(()), names::set)?;
    let state = serde_json::to_vec(identity).map_err(|e| e.to_string())?;
    guest
        .save(&state)
        .map_err(|e| format!("cannot save the identity: {e}"))?;
    guest
        .freeze(false)
        .map_err(|e| format!("cannot thaw the processes: {e}"))
}

/// What follows from a new identity and may fail without making it invalid.
fn settle(agent: &Agent, name: Option<&str>) {
    let complain = |result: Result<(), String>| {
        if let Err(message) = result {
            eprintln!("aenv-envd: {message}");
        }
    };
    if let Some(guest) = &agent.kernel.guest {
        complain(guest.grow());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A user may have removed /etc; the kernel knows the name already.
        if let (Some(name), Ok(etc)) = (name, open("/etc", flags, Mode::empty())) {
            complain(names::write(etc.as_fd(), name));
        }
    }
    // Looked up now, so that the user stays known if the account files vanish.
    let default = agent.identity().default_user.clone();
    agent.users.find(&default);
}

fn parse_clock(text: &str) -> Result<OffsetDateTime, String> {
    let time = OffsetDateTime::parse(text, &Rfc3339)
        .map_err(|e| format!("timestamp {text:?} is not RFC 3339: {e}"))?;
    // The kernel refuses times before 1970.
    if time.unix_timestamp() < 0 {
        return Err(format!("timestamp {text:?} is before 1970"));
    }
    Ok(time)
}

fn parse_entropy(text: &str) -> Result<Vec<u8>, String> {
    let bytes = wire::decode(text).map_err(|e| format!("entropy is not base64: {e}"))?;
    if !ENTROPY.contains(&bytes.len()) {
        return Err(format!(
            "entropy must be {} to {} bytes",
            ENTROPY.start(),
            ENTROPY.end()
        ));
    }
    Ok(bytes)
}

fn set_clock(time: OffsetDateTime) -> Result<(), String> {
    let wanted = time.unix_timestamp_nanos();
    if (wanted - OffsetDateTime::now_utc().unix_timestamp_nanos()).abs() < CLOCK_TOLERANCE {
        return Ok(());
    }
    let wanted = Timespec {
        tv_sec: time.unix_timestamp(),
        tv_nsec: i64::from(time.nanosecond()),
    };
    clock_settime(ClockId::Realtime, wanted).map_err(|e| format!("cannot set the clock: {e}"))
}

/// Credits `entropy` to the kernel's random generator and makes it use it at once.
fn reseed(random: &File, entropy: &[u8]) -> Result<(), String> {
    /// `_IOW('R', 0x03, int[2])` and `_IO('R', 0x07)` of <linux/random.h>.
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    // struct rand_pool_info: credited bits, size in bytes, data.
    let mut pool = Vec::with_capacity(8 + entropy.len());
    pool.extend_from_slice(&(entropy.len() as i32 * 8).to_ne_bytes());
    pool.extend_from_slice(&(entropy.len() as i32).to_ne_bytes());
    pool.extend_from_slice(entropy);
    // SAFETY: the descriptor is open, and the kernel reads the two integers and as many bytes as the
    // second of them says, all of which are in `pool`.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, pool.as_ptr()) };
    // SAFETY: the request takes no argument.
    if added != 0 || unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _) } != 0 {
        return Err(format!(
            "cannot reseed the random generator: {}",
            std::io::Error::last_os_error()
        ));
    }
    Ok(())
}

/// `POST /freeze`: stops user code until the next `POST /init`, so that none runs on a copied machine
/// before its random generator and clock are set.
pub fn freeze(agent: &Agent, headers: &HeaderMap) -> Response<Body> {
    if let Err(refusal) = authorize(&agent.identity(), headers, false) {
        return *refusal;
    }
    match agent
        .kernel
        .guest
        .as_ref()
        .map_or(Ok(()), |guest| guest.freeze(true))
    {
        Ok(()) => http::empty(StatusCode::NO_CONTENT),
        Err(e) => http::error(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("cannot freeze the processes: {e}"),
        ),
    }
}

/// Mark of the response after which the machine ends.
#[derive(Clone)]
pub struct Farewell;

pub async fn shutdown(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    if let Err(refusal) = authorize(&agent.identity(), request.headers(), false) {
        return *refusal;
    }
    let mut response = http::empty(StatusCode::NO_CONTENT);
    // The end begins when this connection is done, so that the answer is not lost.
    response
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("close"));
    response.extensions_mut().insert(Farewell);
    response
}

/// Ends the machine; outside of one, the agent and its processes.
pub fn end(agent: &Agent) {
    if agent.kernel.guest.is_none() {
        agent.processes.kill_all();
        agent.stop.send_replace(true);
    } else if let Err(error) = kill_process(Pid::INIT, Signal::TERM) {
        // The first process stops everything, us included. It cannot be gone while we run.
        eprintln!("aenv-envd: cannot reach the first process: {error}");
    }
}
