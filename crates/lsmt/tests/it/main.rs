//! Tests against real layer files, and of the whole engine.

mod support;

mod read;
mod zfile;
