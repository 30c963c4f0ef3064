//! `milpa info PATH`: inode, layout and replicas of one file.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use milpa_fuse::adapter::{INFO_XATTR, MOUNT_XATTR};
use serde_json::Value;

use super::print_json;
use crate::failure::{Failure, Outcome};
use crate::size::show_bytes;
use crate::table::Table;

/// Asks the mount itself, through a virtual extended attribute: whoever may read the file may know.
pub fn run(path: &Path, json: bool) -> Outcome {
    let text = read_attribute(path, INFO_XATTR)?;
    let found: Value = serde_json::from_slice(&text)
        .map_err(|e| Failure::cluster("the mount gave no layout").because(&e))?;
    if json {
        return print_json(&found);
    }
    print(path, &found);
    Ok(())
}

/// Who serves the mount that `path` lies on.
pub fn mount_of(path: &Path) -> Outcome<Value> {
    serde_json::from_slice(&read_attribute(path, MOUNT_XATTR)?)
        .map_err(|e| Failure::cluster("the mount does not say who serves it").because(&e))
}

fn read_attribute(path: &Path, name: &str) -> Outcome<Vec<u8>> {
    get_xattr(path, name).map_err(|e| {
        let failure = Failure::user(format!("cannot look at {}", path.display())).because(&e);
        match e.raw_os_error() {
            Some(libc::ENODATA | libc::EOPNOTSUPP) => {
                failure.fix("name a file below a MilpaFS mount point")
            }
            _ => failure,
        }
    })
}

#[allow(unsafe_code)]
fn get_xattr(path: &Path, name: &str) -> std::io::Result<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let name = CString::new(name)?;
    // The layout of a large file may grow between the two calls, so leave room.
    // SAFETY: two NUL-terminated strings and no buffer: asks for the length only.
    let length = unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    let Ok(length) = usize::try_from(length) else { return Err(std::io::Error::last_os_error()) };
    let mut value = vec![0_u8; length * 2 + 4096];
    let buffer = value.as_mut_ptr().cast();
    // SAFETY: two NUL-terminated strings and a buffer of the given length.
    let length = unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), buffer, value.len()) };
    let Ok(length) = usize::try_from(length) else { return Err(std::io::Error::last_os_error()) };
    value.truncate(length);
    Ok(value)
}

fn print(path: &Path, found: &Value) {
    let size = found["size"].as_u64().unwrap_or(0);
    println!("path            {}", path.display());
    println!("inode           {} ({})", found["inode"], text(&found["kind"]).to_lowercase());
    println!("size            {size} bytes ({})", show_bytes(size));
    println!("content version {}", found["content_version"]);
    let meta = &found["meta"];
    println!("meta partition  {} on nodes {}", meta["partition"], nodes(&meta["members"]));
    if found["inline_bytes"].as_u64().is_some_and(|bytes| bytes > 0) {
        println!("content         {} bytes in the inode", found["inline_bytes"]);
    }
    let segments = found["segments"].as_array().map(Vec::as_slice).unwrap_or_default();
    if segments.is_empty() {
        return;
    }
    let titles =
        ["offset", "length", "partition", "extent", "at", "epoch", "primary", "nodes", "flushed"];
    let mut table = Table::new(&titles);
    for segment in segments {
        table.row(vec![
            segment["offset"].to_string(),
            segment["length"].to_string(),
            segment["partition"].to_string(),
            extent(segment),
            segment["extent_offset"].to_string(),
            segment["epoch"].to_string(),
            segment["primary"].to_string(),
            nodes(&segment["members"]),
            if segment["flushed"] == true { "yes" } else { "no" }.to_owned(),
        ]);
    }
    print!("\n{}", table.render());
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

fn nodes(members: &Value) -> String {
    let list = members.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Shared extents have their own numbering, marked by the top bit of the id.
fn extent(segment: &Value) -> String {
    let id = segment["extent"].as_u64().unwrap_or(0);
    if segment["small"] == true { format!("small {}", id & !(1 << 63)) } else { id.to_string() }
}
