//! A door for fuzzing: what the kernel sends, served by a file system that has nothing.

use std::io;
use std::sync::Arc;

use crate::Filesystem;
use crate::dispatch::{Dialect, dispatch};
use crate::interrupt::Interrupts;
use crate::reply::ReplySink;

struct Nothing;

impl Filesystem for Nothing {}

#[derive(Default)]
struct Nobody(Arc<Interrupts>);

impl ReplySink for Nobody {
    fn send(&self, _: u64, _: i32, _: &[io::IoSlice<'_>]) -> io::Result<()> {
        Ok(())
    }

    fn interrupts(&self) -> &Arc<Interrupts> {
        &self.0
    }
}

/// Decodes one message as the session does, in both dialects, and answers it.
pub fn serve(bytes: &[u8]) {
    let sink: Arc<dyn ReplySink> = Arc::new(Nobody::default());
    for setxattr_extended in [false, true] {
        dispatch(&Nothing, Dialect { setxattr_extended }, &sink, bytes);
    }
}
