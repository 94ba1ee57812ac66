//! The edge of a node: the one port everything comes in through.
//!
//! ```text
//!            TCP listener                    client.rs    accept, limits, idle and slow clients, RST
//!                 |
//!              proxy.rs                      target.rs    which sandbox and port, or the control API
//!             /        \                     headers.rs   what may pass from one connection to the next
//!   Unix socket of     guest port            routes.rs    sandboxes, generations, who is served now
//!   the control API    in its namespace      upstream.rs  connections, their pool
//!                                            netns.rs     sockets inside other network namespaces
//! ```
//!
//! The edge decides nothing about sandboxes. The control plane writes its route table through `control.rs` and may come
//! and go while traffic flows.
//!
//! TLS would wrap [`client::ClientIo`], HTTP/2 would replace `serve_connection` in `client.rs` and turn the abort of a
//! connection into a reset of a stream, and waking a paused sandbox belongs where `proxy.rs` looks a route up.

pub mod answer;
pub mod body;
pub mod client;
pub mod control;
pub mod edge;
pub mod headers;
pub mod log;
pub mod netns;
pub mod options;
pub mod path;
pub mod proxy;
pub mod routes;
pub mod target;
pub mod tunnel;
pub mod upstream;
