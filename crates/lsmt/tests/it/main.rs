//! Tests against real layer files, and of the whole engine.

mod support;

mod commit;
mod pair;
mod read;
mod zfile;
