//! Tests against real layer files, and of the whole engine.

mod support;

mod commit;
mod image;
mod pair;
mod read;
mod zfile;
