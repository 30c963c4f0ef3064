//! The end of a run, seen by a client that has seen nothing before: is everything there, does it
//! fit together, can it be deleted?

use bytes::Bytes;
use milpa_client::{Client, ClientConfig, FsError, OpenFlags};
use milpa_model::content::Reader;
use milpa_model::dentry::Call;
use milpa_model::tree::Tree;
use milpa_types::{Attributes, DataError, FileKind, InodeId, Name};

use super::names::target_of;
use crate::history::SharedHistory;
use crate::observer::LOST;
use crate::trace;

/// Bytes asked for at once.
const READ_BYTES: u32 = 256 << 10;
const PAGE: u32 = 100;

async fn list(client: &Client, directory: InodeId) -> Result<Vec<(Name, Attributes)>, FsError> {
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = client.readdir(directory, after, PAGE, true).await?;
        after = page.entries.last().map(|entry| entry.name.clone());
        for entry in page.entries {
            let attributes = match entry.attributes {
                Some(attributes) => attributes,
                None => client.getattr(entry.inode).await?,
            };
            listed.push((entry.name, attributes));
        }
        if page.end || after.is_none() {
            return Ok(listed);
        }
    }
}

async fn read_all(client: &Client, inode: InodeId) -> Result<Vec<u8>, FsError> {
    let file = client.open(inode, OpenFlags::read_only()).await?;
    let mut bytes = Vec::new();
    loop {
        let pieces = client.read(file.handle, bytes.len() as u64, READ_BYTES).await?;
        let got: usize = pieces.iter().map(Bytes::len).sum();
        bytes.extend(pieces.concat());
        if got < READ_BYTES as usize {
            break;
        }
    }
    client.release(file.handle).await?;
    Ok(bytes)
}

/// Whether these are bytes that a data node has said to be on no replica any more.
fn is_lost(error: &FsError) -> bool {
    let says_lost = matches!(error, FsError::Data(DataError::Corrupt { .. }) | FsError::Lost(_));
    says_lost && trace::has_error(LOST)
}

/// Walks everything, reads every file and judges what it finds. Bytes of a file that are on no replica any
/// more are one of the findings unless it `may_lose`: two data servers have failed. (What is
/// damaged and of no file was acknowledged to nobody, and may have been on one replica only.)
pub(crate) async fn verify(
    config: ClientConfig,
    number: u32,
    history: SharedHistory,
    may_lose: bool,
) -> String {
    let client = match Client::connect(config).await {
        Ok(client) => client,
        Err(error) => return format!("verification cannot connect: {error}"),
    };
    match walk(&client, number, &history, may_lose).await {
        Ok(summary) => summary,
        Err(error) => {
            history.borrow_mut().violated("final walk", error.to_string());
            "failed".to_owned()
        }
    }
}

async fn walk(
    client: &Client,
    number: u32,
    history: &SharedHistory,
    may_lose: bool,
) -> Result<String, FsError> {
    let mut tree = Tree::new(client.getattr(InodeId::ROOT).await?);
    let mut directories = vec![InodeId::ROOT];
    let (mut files, mut bytes) = (0, 0);
    while let Some(directory) = directories.pop() {
        let begin = history.borrow_mut().moment();
        let listed = list(client, directory).await?;
        note_listing(history, directory, begin, &listed);
        for (name, attributes) in listed {
            if !tree.add(directory, attributes) {
                let detail = format!("{directory}/{name} is found a second time");
                history.borrow_mut().violated("tree", detail);
                continue;
            }
            match attributes.kind {
                FileKind::Directory => directories.push(attributes.inode),
                FileKind::File => {
                    let opened = history.borrow_mut().moment();
                    let content = match read_all(client, attributes.inode).await {
                        Err(error) if is_lost(&error) => {
                            if !may_lose {
                                let detail = format!("{directory}/{name}: {error}");
                                let check = "no loss without two failures";
                                history.borrow_mut().violated(check, detail);
                            }
                            continue;
                        }
                        read => read?,
                    };
                    (files, bytes) = (files + 1, bytes + content.len());
                    judge_file(history, number, opened, attributes.inode, &content);
                    let problem = size_problem(client, &attributes, content.len() as u64).await?;
                    if let Some(problem) = problem {
                        history.borrow_mut().violated("file size at the end", problem);
                    }
                }
                FileKind::Symlink => {
                    let target = client.readlink(attributes.inode).await?;
                    if target != target_of(&name).as_bytes() {
                        let detail = format!("{directory}/{name} leads to {target:?}");
                        history.borrow_mut().violated("targets of links", detail);
                    }
                }
                _ => {}
            }
        }
    }
    for problem in tree.problems() {
        history.borrow_mut().violated("tree", problem);
    }
    let summary = format!("{} inodes, {files} files, {bytes} bytes", tree.inodes());
    trace::note(&format!("verified {summary}"));
    Ok(summary)
}

fn note_listing(
    history: &SharedHistory,
    directory: InodeId,
    begin: u64,
    listed: &[(Name, Attributes)],
) {
    let mut history = history.borrow_mut();
    let known = history.names.keys().filter(|(parent, _)| *parent == directory);
    let mut names: Vec<Name> = known.map(|(_, name)| name.clone()).collect();
    names.extend(listed.iter().map(|(name, _)| name.clone()));
    names.sort_unstable();
    names.dedup();
    for name in names {
        let seen = listed.iter().find(|(found, _)| *found == name).map(|(_, a)| a.inode);
        history.saw(&(directory, name), begin, Call::Saw(seen));
    }
}

fn judge_file(history: &SharedHistory, client: u32, opened: u64, inode: InodeId, content: &[u8]) {
    let mut history = history.borrow_mut();
    history.judged_reads += 1;
    let reader = Reader { client, opened, began: opened };
    let asked = history.content(inode).size_max().max(content.len() as u64) + 1;
    let judged = history.content(inode).judge(reader, 0, asked, content);
    if let Err(wrong) = judged {
        let detail = format!(
            "inode {inode} has {} bytes at the end (opened {opened}); wrong at {}: {:?}; {}",
            content.len(),
            wrong.offset,
            wrong.found,
            wrong.explanation
        );
        history.violated("file content at the end", detail);
    }
}

/// What is wrong with the size of a file of which so many bytes can be read. It may be larger while bytes
/// that were never synced are lost; then the next fsync fails, and cuts the file (docs/guarantees.md).
async fn size_problem(
    client: &Client,
    attributes: &Attributes,
    bytes: u64,
) -> Result<Option<String>, FsError> {
    let (inode, size) = (attributes.inode, attributes.size);
    // Another name of the file may have been looked at since the listing, and the file cut.
    if size == bytes || client.getattr(inode).await?.size == bytes {
        return Ok(None);
    }
    let handle = client.open(inode, OpenFlags::read_only()).await?.handle;
    let synced = client.fsync(handle, false).await;
    client.release(handle).await?;
    let after = client.getattr(inode).await?.size;
    let is_cut = synced.is_err() && after == bytes;
    Ok((!is_cut).then(|| {
        format!(
            "inode {inode}: size {size} and {bytes} bytes read; {after} after fsync: {synced:?}"
        )
    }))
}

/// Deletes everything, deepest first.
pub(crate) async fn delete_all(config: ClientConfig, history: SharedHistory) -> String {
    let deleting = async {
        let client = Client::connect(config).await.map_err(|error| error.to_string())?;
        let deleted = delete_tree(&client).await.map_err(|error| error.to_string())?;
        client.shutdown().await.map_err(|error| error.to_string())?;
        Ok::<_, String>(deleted)
    };
    match deleting.await {
        Ok(deleted) => format!("deleted {deleted} names"),
        Err(error) => {
            history.borrow_mut().violated("final deletion", error);
            "failed".to_owned()
        }
    }
}

async fn delete_tree(client: &Client) -> Result<u64, FsError> {
    let mut deleted = 0;
    // Directories with the place that they will be removed from, parents first.
    let mut order: Vec<(InodeId, Name, InodeId)> = Vec::new();
    let mut open = vec![InodeId::ROOT];
    while let Some(directory) = open.pop() {
        for (name, attributes) in list(client, directory).await? {
            if attributes.kind == FileKind::Directory {
                order.push((directory, name, attributes.inode));
                open.push(attributes.inode);
            } else {
                client.unlink(directory, &name).await?;
                deleted += 1;
            }
        }
    }
    // A directory is found after its parent, so in reverse the deepest come first.
    for (parent, name, _) in order.iter().rev() {
        client.rmdir(*parent, name).await?;
        deleted += 1;
    }
    Ok(deleted)
}
