//! The calls, one by one.

use std::path::PathBuf;
use std::time::Duration;

use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use serde::Deserialize;
use serde_json::json;

use super::{body, no_content, told, with_body, Control, End};
use crate::daemon::view::{LayerView, SealView};
use crate::failure::{Failure, Result};
use crate::image::trace;
use crate::memory::Plan;
use crate::progress::Phase;
use crate::table::{Durability, LayerRef, Mode, Spec};

/// Longest time a call may wait, in milliseconds.
const MAX_WAIT: u64 = 600_000;

type Answer = Result<Response<Full<Bytes>>>;

#[derive(Deserialize)]
struct Open {
    layers: Vec<LayerRef>,
    #[serde(default)]
    virtual_size: u64,
    mode: Mode,
    read_only: bool,
    #[serde(default)]
    durability: Durability,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
    #[serde(default = "owner_only")]
    permissions: u32,
}

fn owner_only() -> u32 {
    0o600
}

#[derive(Deserialize)]
struct Wait {
    /// How long to wait for the layer to be on stable storage.
    #[serde(default)]
    wait_ms: u64,
}

/// A layer to make: captured over `layers`, or merged from them. Bottom first.
#[derive(Deserialize)]
struct Make {
    layers: Vec<LayerRef>,
    capture: Option<Plan>,
    #[serde(default)]
    merge: bool,
}

#[derive(Deserialize)]
struct Replace {
    with: String,
}

#[derive(Deserialize)]
struct Resize {
    virtual_size: u64,
}

/// Without a file, recording begins; with one, it ends.
#[derive(Deserialize)]
struct Trace {
    save: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Prefetch {
    trace: PathBuf,
}

#[derive(Deserialize)]
struct Shutdown {
    #[serde(default)]
    unmount: bool,
}

impl Control {
    pub(super) async fn list_images(&self) -> Answer {
        self.run(|daemon| {
            let images = daemon.images();
            let views: Vec<_> = images.iter().map(|image| daemon.view(image)).collect();
            Ok(json!({ "images": views }))
        })
        .await
    }

    pub(super) async fn get_image(&self, id: &str) -> Answer {
        let id = id.to_owned();
        self.run(move |daemon| {
            let image = daemon.image(&id)?;
            Ok(daemon.view(&image))
        })
        .await
    }

    pub(super) async fn put_image(&self, id: &str, request: Request<Incoming>) -> Answer {
        let open: Open = body(request).await?;
        if open.permissions & !0o777 != 0 {
            return Err(Failure::bad_request(format!(
                "permissions are at most 511 (octal 777), not {}",
                open.permissions
            )));
        }
        let id = id.to_owned();
        let spec = Spec {
            layers: open.layers,
            virtual_size: open.virtual_size,
            mode: open.mode,
            read_only: open.read_only,
            durability: open.durability,
            uid: open.uid,
            gid: open.gid,
            permissions: open.permissions,
            created: 0,
        };
        self.run(move |daemon| {
            let image = daemon.open(&id, spec)?;
            Ok(daemon.view(&image))
        })
        .await
    }

    pub(super) async fn delete_image(&self, id: &str) -> Answer {
        let id = id.to_owned();
        self.run(move |daemon| daemon.close(&id)).await?;
        Ok(no_content())
    }

    pub(super) async fn resize(&self, id: &str, request: Request<Incoming>) -> Answer {
        let resize: Resize = body(request).await?;
        let id = id.to_owned();
        self.run(move |daemon| {
            let image = daemon.grow(&id, resize.virtual_size)?;
            Ok(daemon.view(&image))
        })
        .await
    }

    pub(super) async fn seal(&self, id: &str, request: Request<Incoming>) -> Answer {
        let wait: Wait = body(request).await?;
        check_wait(wait.wait_ms)?;
        let id = id.to_owned();
        let daemon = self.daemon.clone();
        let sealed = tokio::task::spawn_blocking(move || daemon.seal(&id)).await;
        let mut seal = sealed.map_err(|_| {
            Failure::new(500, "the seal failed in an unforeseen way; see the log")
        })??;
        self.wait_for(&seal.layer.id, &Phase::Sealed, wait.wait_ms)
            .await;
        seal.layer = self.daemon.layer(&seal.layer.id)?;
        if let Phase::Failed(cause) = &seal.layer.phase {
            return Err(Failure::new(
                507,
                format!("the sealed layer could not be written; it is still readable, and sealing again tries once more: {cause}"),
            ));
        }
        Ok(with_body(http::StatusCode::OK, &SealView::from(seal)))
    }

    pub(super) async fn trace(&self, id: &str, request: Request<Incoming>) -> Answer {
        let trace: Trace = body(request).await?;
        let id = id.to_owned();
        self.run(move |daemon| {
            let image = daemon.image(&id)?;
            let Some(path) = trace.save else {
                image.stack()?;
                image.recorder.start();
                return Ok(json!({ "recording": true }));
            };
            daemon.off_the_mount(&path)?;
            let records = image.recorder.stop();
            let mut bytes = Vec::new();
            lsmt::trace::write(&records, &mut bytes)
                .and_then(|()| {
                    std::fs::write(&path, &bytes).map_err(|source| lsmt::Error::Io {
                        action: format!("write {}", path.display()),
                        source,
                    })
                })
                .map_err(Failure::lsmt(format!("save the trace of image {id}")))?;
            let total: u64 = records.iter().map(|record| record.count).sum();
            Ok(json!({ "recording": false, "records": records.len(), "bytes": total }))
        })
        .await
    }

    pub(super) async fn prefetch(&self, id: &str, request: Request<Incoming>) -> Answer {
        let prefetch: Prefetch = body(request).await?;
        let id = id.to_owned();
        self.run(move |daemon| {
            daemon.off_the_mount(&prefetch.trace)?;
            let stack = daemon.image(&id)?.stack()?;
            let records = trace::load(&prefetch.trace).map_err(Failure::lsmt(format!(
                "read the trace {}",
                prefetch.trace.display()
            )))?;
            let count = records.len();
            trace::prefetch(stack, records);
            Ok(json!({ "records": count }))
        })
        .await
    }

    pub(super) async fn list_layers(&self) -> Answer {
        self.run(|daemon| {
            let layers = daemon.all_layers();
            let views: Vec<_> = layers.iter().map(LayerView::from).collect();
            Ok(json!({ "layers": views }))
        })
        .await
    }

    pub(super) async fn get_layer(&self, id: &str, query: Option<&str>) -> Answer {
        let (mut wait, mut until) = (0, Phase::Sealed);
        for parameter in query
            .unwrap_or_default()
            .split('&')
            .filter(|p| !p.is_empty())
        {
            match parameter.split_once('=') {
                Some(("wait_ms", number)) => {
                    wait = number
                        .parse()
                        .map_err(|_| Failure::bad_request("wait_ms is a number of milliseconds"))?;
                }
                Some(("until", "copied")) => until = Phase::Copied,
                Some(("until", "sealed")) => until = Phase::Sealed,
                _ => {
                    return Err(Failure::bad_request(
                        "the parameters are wait_ms, a number of milliseconds, and until, copied or sealed",
                    ))
                }
            }
        }
        check_wait(wait)?;
        self.daemon.layer(id)?;
        self.wait_for(id, &until, wait).await;
        let id = id.to_owned();
        self.run(move |daemon| Ok(LayerView::from(&daemon.layer(&id)?)))
            .await
    }

    pub(super) async fn make_layer(&self, id: &str, request: Request<Incoming>) -> Answer {
        let make: Make = body(request).await?;
        let id = id.to_owned();
        self.run(move |daemon| {
            let layer = match (make.capture, make.merge) {
                (Some(plan), false) => daemon.capture(&id, make.layers, plan)?,
                (None, true) => daemon.merge(&id, make.layers)?,
                _ => {
                    return Err(Failure::bad_request(
                        "a layer is made by a capture or by a merge; say one of the two",
                    ))
                }
            };
            Ok(LayerView::from(&layer))
        })
        .await
    }

    pub(super) async fn replace(&self, id: &str, request: Request<Incoming>) -> Answer {
        let replace: Replace = body(request).await?;
        let id = id.to_owned();
        self.run(move |daemon| {
            let image = daemon.replace(&id, &replace.with)?;
            Ok(daemon.view(&image))
        })
        .await
    }

    pub(super) async fn delete_layer(&self, id: &str) -> Answer {
        let id = id.to_owned();
        self.run(move |daemon| daemon.drop_layer(&id)).await?;
        Ok(no_content())
    }

    pub(super) async fn shutdown(&self, request: Request<Incoming>) -> Answer {
        let shutdown: Shutdown = body(request).await?;
        let end = if shutdown.unmount {
            End::Unmount
        } else {
            End::Leave
        };
        self.end.send_replace(Some(end));
        Ok(no_content())
    }

    /// Waits until a layer is so far, or has failed, or for so many milliseconds, or for the end of the daemon.
    async fn wait_for(&self, id: &str, until: &Phase, milliseconds: u64) {
        let Some(mut phase) = self.daemon.watch(id) else {
            return;
        };
        let mut end = self.end.subscribe();
        let reached = |phase: &Phase| match phase {
            Phase::Writing => false,
            Phase::Copied => *until == Phase::Copied,
            Phase::Sealed | Phase::Failed(_) => true,
        };
        let done = async {
            let _ = phase.wait_for(reached).await;
        };
        tokio::select! {
            () = done => {}
            () = told(&mut end) => {}
            () = tokio::time::sleep(Duration::from_millis(milliseconds)) => {}
        }
    }
}

fn check_wait(milliseconds: u64) -> Result<()> {
    if milliseconds > MAX_WAIT {
        return Err(Failure::bad_request(format!(
            "a call waits at most {MAX_WAIT} ms"
        )));
    }
    Ok(())
}
