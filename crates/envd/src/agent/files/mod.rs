//! `GET` and `POST /files`: whole files over plain HTTP.

mod body;
mod download;
mod multipart;
mod upload;

use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderValue, ALLOW};
use hyper::{Method, Request, Response, StatusCode};
use rustix::io::Errno;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::http::{self, Body};
use super::users::User;
use super::{token, Agent};

/// An answer that is not a success.
#[derive(Debug)]
pub struct Failure {
    status: StatusCode,
    message: String,
}

impl Failure {
    fn new(status: StatusCode, message: impl Into<String>) -> Failure {
        Failure {
            status,
            message: message.into(),
        }
    }

    fn bad(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, message)
    }

    /// An error of the file system, in words about `path`.
    fn io(path: &Path, error: &io::Error) -> Failure {
        let path = path.display();
        match Errno::from_io_error(error) {
            Some(Errno::NOENT | Errno::NOTDIR) => Failure::new(
                StatusCode::NOT_FOUND,
                format!("path '{path}' does not exist"),
            ),
            Some(Errno::ISDIR) => Failure::bad(format!("path '{path}' is a directory")),
            Some(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY) => Failure::new(
                StatusCode::FORBIDDEN,
                format!("path '{path}' cannot be used: {error}"),
            ),
            Some(Errno::NOSPC | Errno::DQUOT) => Failure::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!("not enough disk space for '{path}'"),
            ),
            Some(Errno::LOOP | Errno::NAMETOOLONG | Errno::INVAL | Errno::NXIO) => {
                Failure::bad(format!("path '{path}' cannot be used: {error}"))
            }
            _ => Failure::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("'{path}': {error}"),
            ),
        }
    }

    fn response(&self) -> Response<Body> {
        http::error(self.status, &self.message)
    }
}

/// The query of a request for a file.
#[derive(Default)]
struct Target {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    expiration: Option<String>,
}

impl Target {
    fn parse(query: &str) -> Result<Target, Failure> {
        let mut target = Target::default();
        for (key, value) in http::query(query).map_err(Failure::bad)? {
            match &*key {
                "path" => target.path = Some(value),
                "username" => target.username = Some(value),
                "signature" => target.signature = Some(value),
                "signature_expiration" => target.expiration = Some(value),
                _ => {}
            }
        }
        Ok(target)
    }

    /// Checks that the request may be made: by access token, or by a signature made with it.
    fn authorize(
        &self,
        agent: &Agent,
        headers: &HeaderMap,
        operation: &str,
    ) -> Result<(), Failure> {
        let secret = agent.identity().access_token.clone();
        let signed = token::Signed {
            path: self.path.as_deref().unwrap_or(""),
            operation,
            user: self.username.as_deref().unwrap_or(""),
            signature: self.signature.as_deref(),
            expiration: self.expiration.as_deref(),
        };
        token::authorize_file(&secret, headers.get(token::ACCESS_HEADER), &signed)
            .map_err(|message| Failure::new(StatusCode::UNAUTHORIZED, message))
    }

    async fn user(&self, agent: &Arc<Agent>) -> Result<User, Failure> {
        agent
            .user(self.username.as_deref().unwrap_or(""))
            .await
            .map_err(|message| Failure::new(StatusCode::UNAUTHORIZED, message))
    }
}

pub async fn serve(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    let query = request.uri().query().unwrap_or("").to_owned();
    let target = match Target::parse(&query) {
        Ok(target) => target,
        Err(failure) => return failure.response(),
    };
    let result = match *request.method() {
        Method::GET | Method::HEAD => download::serve(agent, request, target).await,
        Method::POST => upload::serve(agent, request, target).await,
        _ => {
            let mut response = http::error(StatusCode::METHOD_NOT_ALLOWED, "use GET or POST");
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
            Ok(response)
        }
    };
    result.unwrap_or_else(|failure| failure.response())
}

/// Runs blocking file work on its own thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let failed = |e| {
        Failure::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the file operation failed: {e}"),
        )
    };
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}
