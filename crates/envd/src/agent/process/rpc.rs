//! The procedures of `process.Process`.

use hyper::body::Incoming;
use hyper::{Request, Response};
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::termios::{tcsetwinsize, Winsize};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::messages::{self, keepalive_event, Info, Size};
use super::spawn::{spawn, Plan};
use super::stream::channel;
use super::table::{InputFd, Process};
use crate::agent::call;
use crate::agent::connect::{self, check, Code, Error, Kind, Messages};
use crate::agent::filesystem::{path, walk};
use crate::agent::http::{self, Body};
use crate::agent::identity::check_variable;
use crate::agent::users::User;
use crate::agent::{blocking, Agent};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Serves one call, or `None` if the service has no such procedure.
pub async fn serve(
    agent: Arc<Agent>,
    method: &str,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    let kind = match method {
        "Start" | "Connect" | "StreamInput" => Kind::Stream,
        "List" | "Update" | "SendInput" | "SendSignal" | "CloseStdin" => Kind::Unary,
        _ => return None,
    };
    if let Err(response) = check(request.headers(), kind) {
        return Some(*response);
    }
    Some(match method {
        "Start" => start(agent, request)
            .await
            .unwrap_or_else(|e| connect::stream_error(&e)),
        "Connect" => attach(agent, request)
            .await
            .unwrap_or_else(|e| connect::stream_error(&e)),
        "StreamInput" => connect::stream_single(stream_input(agent, request).await),
        "List" => list(agent, request).await,
        "Update" => connect::unary(update(agent, request).await),
        "SendInput" => connect::unary(send_input(agent, request).await),
        "SendSignal" => connect::unary(send_signal(agent, request).await),
        _ => connect::unary(close_stdin(agent, request).await),
    })
}

type Empty = BTreeMap<(), ()>;
const EMPTY: Empty = Empty::new();

async fn start(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Response<Body>, Error> {
    let limit = connect::timeout(request.headers())?;
    let idle = call::keepalive(request.headers());
    let user = call::user(&agent, request.headers()).await;
    let (message, rest) = Messages::new(request.into_body())
        .single::<messages::Start>()
        .await?;
    let user = user?;
    let (owner, stream) = channel(Some(rest), idle, keepalive_event(), None);
    // A task of its own: if the client leaves now, the process is still adopted and not lost.
    let started = tokio::spawn(async move {
        let reservation = agent.processes.reserve()?;
        let config = message.process.unwrap_or_default();
        let for_child = agent.clone();
        let given = config.clone();
        let child = blocking(move || {
            let plan = plan(
                &for_child,
                given,
                user,
                message.pty,
                message.stdin.unwrap_or(true),
            )?;
            let cmd = plan.cmd.clone();
            spawn(&for_child.kernel, plan).map_err(|e| spawn_error(&cmd, &e))
        })
        .await?;
        agent
            .processes
            .adopt(child, config, message.tag, owner, limit)?;
        drop(reservation);
        Ok(())
    });
    started
        .await
        .map_err(|e| Error::internal(format!("starting the process failed: {e}")))??;
    Ok(connect::stream(http::boxed(stream)))
}

fn spawn_error(cmd: &str, error: &std::io::Error) -> Error {
    let code = match Errno::from_io_error(error) {
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => Code::ResourceExhausted,
        _ => Code::InvalidArgument,
    };
    Error::new(code, format!("cannot execute '{cmd}': {error}"))
}

/// Completes what the client asked for with what the sandbox and the user stand for.
fn plan(
    agent: &Agent,
    config: messages::Config,
    user: User,
    pty: Option<messages::Pty>,
    stdin: bool,
) -> Result<Plan, Error> {
    if config.cmd.is_empty()
        || config.cmd.contains('\0')
        || config.args.iter().any(|a| a.contains('\0'))
    {
        return Err(Error::invalid(
            "process.cmd must not be empty, and no argument may contain a NUL byte",
        ));
    }
    let identity = agent.identity();
    let mut env = BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]);
    env.insert("HOME".into(), user.home.to_string_lossy().into_owned());
    env.insert("USER".into(), user.name.clone());
    env.insert("LOGNAME".into(), user.name.clone());
    env.extend(identity.environment());
    for (name, value) in &config.envs {
        check_variable(name, value).map_err(Error::invalid)?;
    }
    env.extend(config.envs);
    let cwd = match config.cwd.as_deref() {
        Some(dir) if !dir.is_empty() => {
            let dir = path::resolve(dir, &user, "")?;
            walk::open_directory_as(&user, &dir).map_err(|e| match Errno::from_io_error(&e) {
                Some(Errno::NOENT | Errno::NOTDIR) => {
                    Error::invalid(format!("cwd '{}' does not exist", dir.display()))
                }
                _ => Error::invalid(format!("cwd '{}' cannot be used: {e}", dir.display())),
            })?
        }
        _ => default_directory(&user, &identity.default_workdir)?,
    };
    let pty = pty.map(|pty| winsize(pty.size)).transpose()?;
    Ok(Plan {
        cmd: config.cmd,
        args: config.args,
        env,
        cwd,
        user,
        pty,
        stdin,
    })
}

/// The default working directory. A missing one must not make the sandbox unusable.
fn default_directory(user: &User, workdir: &str) -> Result<std::os::fd::OwnedFd, Error> {
    let candidates = [workdir.as_ref(), user.home.as_path(), "/".as_ref()];
    candidates
        .into_iter()
        .filter(|dir| dir.is_absolute())
        .find_map(|dir| walk::open_directory_as(user, dir).ok())
        .ok_or_else(|| Error::internal("not even the root directory can be entered"))
}

fn winsize(size: Option<Size>) -> Result<Winsize, Error> {
    let size = size.unwrap_or_default();
    let side = |given: Option<u32>, default: u16| match given.unwrap_or(0) {
        0 => Ok(default),
        n => u16::try_from(n)
            .map_err(|_| Error::invalid("a terminal has at most 65535 columns and rows")),
    };
    Ok(Winsize {
        ws_col: side(size.cols, 80)?,
        ws_row: side(size.rows, 24)?,
        ws_xpixel: 0,
        ws_ypixel: 0,
    })
}

async fn attach(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Response<Body>, Error> {
    let limit = connect::timeout(request.headers())?;
    let idle = call::keepalive(request.headers());
    let (message, rest) = Messages::new(request.into_body())
        .single::<messages::Select>()
        .await?;
    let (subscriber, stream) = channel(Some(rest), idle, keepalive_event(), limit);
    match agent.processes.live(&message.process) {
        Ok(process) => process.subscribe(subscriber),
        Err(error) => agent
            .processes
            .ended(&message.process)
            .ok_or(error)?
            .subscribe(&subscriber),
    }
    Ok(connect::stream(http::boxed(stream)))
}

async fn list(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    if let Err(error) = connect::read_unary::<serde::de::IgnoredAny>(request).await {
        return connect::unary_error(&error);
    }
    let processes = agent.processes.list();
    let infos: Vec<_> = processes
        .iter()
        .map(|p| Info {
            config: &p.config,
            pid: p.pid,
            tag: p.tag.as_deref(),
        })
        .collect();
    connect::unary(Ok(serde_json::json!({ "processes": infos })))
}

async fn update(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Empty, Error> {
    let message: messages::Update = connect::read_unary(request).await?;
    let process = agent.processes.live(&message.process)?;
    if let Some(pty) = message.pty {
        let Some(terminal) = &process.terminal else {
            return Err(Error::new(
                Code::FailedPrecondition,
                format!("process {} has no terminal", process.pid),
            ));
        };
        tcsetwinsize(terminal.get_ref(), winsize(pty.size)?)
            .map_err(|e| Error::internal(format!("cannot resize the terminal: {e}")))?;
    }
    Ok(EMPTY)
}

async fn send_input(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Empty, Error> {
    let message: messages::SendInput = connect::read_unary(request).await?;
    let process = agent.processes.live(&message.process)?;
    write_input(&process, message.input).await?;
    Ok(EMPTY)
}

async fn stream_input(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Empty, Error> {
    let mut messages = Messages::new(request.into_body());
    let first = messages
        .next::<messages::StreamInput>()
        .await?
        .and_then(|m| m.start);
    let Some(start) = first else {
        return Err(Error::invalid(
            "the first message must be start, with the process",
        ));
    };
    let process = agent.processes.live(&start.process)?;
    while let Some(message) = messages.next::<messages::StreamInput>().await? {
        if let Some(data) = message.data {
            write_input(&process, data.input).await?;
        }
    }
    Ok(EMPTY)
}

/// Writes input in full. Waits while the process does not read, at most until it ends.
async fn write_input(process: &Process, input: messages::Input) -> Result<(), Error> {
    let mut ended = process.ended.subscribe();
    let writing = async {
        match (input.stdin, input.pty) {
            (Some(data), None) => {
                let stdin = process.stdin.lock().await;
                let Some(fd) = &*stdin else {
                    let why = if process.terminal.is_some() {
                        "has a terminal, send pty input"
                    } else {
                        "is closed"
                    };
                    return Err(Error::internal(format!(
                        "standard input of process {} {why}",
                        process.pid
                    )));
                };
                write_all(fd, &data).await
            }
            (None, Some(data)) => {
                let Some(terminal) = &process.terminal else {
                    return Err(Error::internal(format!(
                        "process {} has no terminal",
                        process.pid
                    )));
                };
                // The same lock keeps the messages of several writers apart.
                let _order = process.stdin.lock().await;
                write_all(terminal, &data).await
            }
            _ => Err(Error::invalid("input must be stdin or pty")),
        }
        .map_err(|e| match e.code {
            Code::Internal => e,
            _ => Error::new(e.code, format!("process {}: {}", process.pid, e.message)),
        })
    };
    tokio::select! {
        result = writing => result,
        _ = ended.wait_for(|ended| *ended) => {
            Err(Error::not_found(format!("process with pid {} not found: it ended before it read its input", process.pid)))
        }
    }
}

async fn write_all(fd: &InputFd, mut data: &[u8]) -> Result<(), Error> {
    while !data.is_empty() {
        let mut guard = fd
            .writable()
            .await
            .map_err(|e| Error::internal(e.to_string()))?;
        match rustix::io::write(fd.get_ref(), data) {
            Ok(size) => data = &data[size..],
            Err(Errno::AGAIN) => guard.clear_ready(),
            Err(Errno::INTR) => {}
            Err(e) => return Err(Error::internal(format!("cannot write input: {e}"))),
        }
    }
    Ok(())
}

async fn send_signal(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Empty, Error> {
    let message: messages::SendSignal = connect::read_unary(request).await?;
    let signal = match &message.signal {
        Some(messages::Signal::Name(name)) if name == "SIGNAL_SIGTERM" => Signal::TERM,
        Some(messages::Signal::Name(name)) if name == "SIGNAL_SIGKILL" => Signal::KILL,
        Some(messages::Signal::Number(15)) => Signal::TERM,
        Some(messages::Signal::Number(9)) => Signal::KILL,
        other => {
            let message =
                format!("signal {other:?} is not supported, send SIGNAL_SIGTERM or SIGNAL_SIGKILL");
            return Err(Error::new(Code::Unimplemented, message));
        }
    };
    let process = agent.processes.live(&message.process)?;
    match process.signal(signal)? {
        true => Ok(EMPTY),
        false => Err(Error::not_found(format!(
            "process with pid {} not found",
            process.pid
        ))),
    }
}

async fn close_stdin(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Empty, Error> {
    let message: messages::Select = connect::read_unary(request).await?;
    let process = agent.processes.live(&message.process)?;
    if process.terminal.is_some() {
        let message = format!(
            "process {} has a terminal; send it ^D (0x04) instead",
            process.pid
        );
        return Err(Error::new(Code::FailedPrecondition, message));
    }
    let mut ended = process.ended.subscribe();
    tokio::select! {
        mut stdin = process.stdin.lock() => drop(stdin.take()),
        _ = ended.wait_for(|ended| *ended) => {}
    }
    Ok(EMPTY)
}
