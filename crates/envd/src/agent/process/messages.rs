//! Messages of the `process.Process` service, and its events as ready envelopes.

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::agent::connect::{envelope, envelope_raw};
use crate::agent::wire;

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Config {
    #[serde(deserialize_with = "wire::nullable")]
    pub cmd: String,
    #[serde(deserialize_with = "wire::nullable")]
    pub args: Vec<String>,
    #[serde(deserialize_with = "wire::nullable")]
    pub envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Size {
    #[serde(deserialize_with = "wire::unsigned")]
    pub cols: Option<u32>,
    #[serde(deserialize_with = "wire::unsigned")]
    pub rows: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pty {
    pub size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Start {
    pub process: Option<Config>,
    pub pty: Option<Pty>,
    pub tag: Option<String>,
    pub stdin: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selector {
    #[serde(deserialize_with = "wire::unsigned")]
    pub pid: Option<u32>,
    pub tag: Option<String>,
}

/// Connect and CloseStdin, and the first message of StreamInput.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Select {
    #[serde(deserialize_with = "wire::nullable")]
    pub process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    #[serde(deserialize_with = "wire::nullable")]
    pub process: Selector,
    pub pty: Option<Pty>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    #[serde(deserialize_with = "wire::bytes")]
    pub stdin: Option<Vec<u8>>,
    #[serde(deserialize_with = "wire::bytes")]
    pub pty: Option<Vec<u8>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendInput {
    #[serde(deserialize_with = "wire::nullable")]
    pub process: Selector,
    #[serde(deserialize_with = "wire::nullable")]
    pub input: Input,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamInput {
    pub start: Option<Select>,
    pub data: Option<StreamData>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamData {
    #[serde(deserialize_with = "wire::nullable")]
    pub input: Input,
}

/// An enum value: its name or its number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Signal {
    Number(i64),
    Name(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendSignal {
    #[serde(deserialize_with = "wire::nullable")]
    pub process: Selector,
    pub signal: Option<Signal>,
}

#[derive(Debug, Serialize)]
pub struct Info<'a> {
    pub config: &'a Config,
    pub pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<&'a str>,
}

/// Where output came from; the name is that of the field in the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
    Pty,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct End {
    pub exit_code: i32,
    pub exited: bool,
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl End {
    pub fn exited(code: i32) -> End {
        let status = format!("exit status {code}");
        End {
            exit_code: code,
            exited: true,
            error: (code != 0).then(|| status.clone()),
            status,
        }
    }

    /// The status could not be collected.
    pub fn lost() -> End {
        let status = "exit status unknown".to_owned();
        End {
            exit_code: -1,
            exited: false,
            error: Some(status.clone()),
            status,
        }
    }

    pub fn signaled(signal: i32, core: bool) -> End {
        let core = if core { " (core dumped)" } else { "" };
        let status = format!("signal: {}{core}", signal_text(signal));
        End {
            exit_code: -1,
            exited: false,
            error: Some(status.clone()),
            status,
        }
    }
}

/// The wording clients know, which is not that of every C library.
fn signal_text(signal: i32) -> String {
    let text = match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    };
    text.to_owned()
}

pub fn start_event(pid: u32) -> Bytes {
    envelope(&serde_json::json!({ "event": { "start": { "pid": pid } } }))
}

pub fn keepalive_event() -> Bytes {
    envelope_raw(br#"{"event":{"keepalive":{}}}"#)
}

pub fn end_event(end: &End) -> Bytes {
    envelope(&serde_json::json!({ "event": { "end": end } }))
}

pub fn data_event(output: Output, data: &[u8]) -> Bytes {
    let name = match output {
        Output::Stdout => "stdout",
        Output::Stderr => "stderr",
        Output::Pty => "pty",
    };
    let mut json = String::with_capacity(48 + data.len().div_ceil(3) * 4);
    json.push_str(r#"{"event":{"data":{""#);
    json.push_str(name);
    json.push_str(r#"":""#);
    STANDARD.encode_string(data, &mut json);
    json.push_str(r#""}}}"#);
    envelope_raw(json.as_bytes())
}
