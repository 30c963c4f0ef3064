//! `milpa volume …`.

use milpa_types::{Durability, VolumeOptions};
use milpa_wire::manager::{ManagerAnswer, ManagerRequest, VolumeSummary};

use super::{ask, change, confirm, print_json, unexpected};
use crate::arguments::{DurabilityArgument, VolumeCommand, VolumeOptionArguments};
use crate::cluster::Cluster;
use crate::failure::{Failure, Outcome};
use crate::size::show_bytes;
use crate::table::Table;

/// Carries out one of the commands.
pub fn run(cluster: &Cluster, command: VolumeCommand, json: bool) -> Outcome {
    match command {
        VolumeCommand::Create { name, options, meta_partitions, data_partitions } => {
            let request = ManagerRequest::CreateVolume {
                name: name.clone(),
                options: changed(VolumeOptions::default(), &options)?,
                meta_partitions: meta_partitions.unwrap_or(0),
                data_partitions: data_partitions.unwrap_or(0),
            };
            change(
                cluster,
                &request,
                json,
                &format!("created; mount it with: milpa mount {name} DIR"),
            )
        }
        VolumeCommand::List => list(cluster, json),
        VolumeCommand::Info { name } => info(cluster, &name, json),
        VolumeCommand::Set { name, options } => {
            let options = changed(find(cluster, &name)?.volume.options, &options)?;
            let request = ManagerRequest::SetVolume { name, options };
            change(cluster, &request, json, "changed")
        }
        VolumeCommand::Delete { name, yes } => {
            let summary = find(cluster, &name)?;
            confirm_deletion(&summary, yes)?;
            change(cluster, &ManagerRequest::DeleteVolume { name }, json, "deleted")
        }
        VolumeCommand::Key { name } => key(cluster, name, json),
        VolumeCommand::Grow { name, meta_partitions, data_partitions } => {
            let request = ManagerRequest::GrowVolume { name, meta_partitions, data_partitions };
            change(cluster, &request, json, "grown")
        }
    }
}

fn changed(base: VolumeOptions, new: &VolumeOptionArguments) -> Outcome<VolumeOptions> {
    let small = |what: &str, value: u64| {
        u32::try_from(value).map_err(|_| Failure::user(format!("--{what} is too large")))
    };
    let mut options = base;
    if let Some(bytes) = new.inline_max {
        options.inline_bytes_max = small("inline-max", bytes)?;
    }
    if let Some(bytes) = new.small_file_max {
        options.small_file_bytes_max = small("small-file-max", bytes)?;
    }
    options.capacity_bytes = new.capacity.unwrap_or(options.capacity_bytes);
    options.replicas = new.replicas.unwrap_or(options.replicas);
    options.meta_partition_entries_max =
        new.meta_partition_entries_max.unwrap_or(options.meta_partition_entries_max);
    options.durability = match new.durability {
        Some(DurabilityArgument::Synced) => Durability::Synced,
        Some(DurabilityArgument::Memory) => Durability::Memory,
        None => options.durability,
    };
    options.validate().map_err(|problems| Failure::user(problems.join("; ")))?;
    Ok(options)
}

fn volumes(cluster: &Cluster) -> Outcome<Vec<VolumeSummary>> {
    match ask(cluster, &ManagerRequest::ListVolumes)? {
        ManagerAnswer::Volumes(volumes) => Ok(volumes),
        other => Err(unexpected(&other)),
    }
}

fn find(cluster: &Cluster, name: &str) -> Outcome<VolumeSummary> {
    let found = volumes(cluster)?.into_iter().find(|v| v.volume.name == name);
    found.ok_or_else(|| {
        Failure::user(format!("no volume named {name:?}"))
            .fix("`milpa volume list` shows their names")
    })
}

/// A table of volumes.
pub fn table(volumes: &[VolumeSummary]) -> Table {
    let titles = ["volume", "files", "used", "capacity", "copies", "durability", "partitions"];
    let mut table = Table::new(&titles);
    for summary in volumes {
        let options = &summary.volume.options;
        table.row(vec![
            summary.volume.name.clone(),
            summary.inodes.to_string(),
            show_bytes(summary.used_bytes),
            match options.capacity_bytes {
                0 => "the disks'".to_owned(),
                bytes => show_bytes(bytes),
            },
            options.replicas.to_string(),
            format!("{:?}", options.durability).to_lowercase(),
            format!("{} meta, {} data", summary.meta_partitions, summary.data_partitions),
        ]);
    }
    table
}

fn list(cluster: &Cluster, json: bool) -> Outcome {
    let volumes = volumes(cluster)?;
    if json {
        return print_json(&volumes);
    }
    print!("{}", table(&volumes).render());
    Ok(())
}

fn info(cluster: &Cluster, name: &str, json: bool) -> Outcome {
    let summary = find(cluster, name)?;
    if json {
        return print_json(&summary);
    }
    let options = &summary.volume.options;
    println!("volume                      {} (id {})", name, summary.volume.id);
    println!("files                       {}", summary.inodes);
    println!("used, one copy counted      {}", show_bytes(summary.used_bytes));
    println!("capacity_bytes              {}", options.capacity_bytes);
    println!("replicas                    {}", options.replicas);
    let durability = match options.durability {
        Durability::Synced => "synced",
        Durability::Memory => {
            "MEMORY: a power cut may lose what fsync has acknowledged in the last seconds"
        }
    };
    println!("durability                  {durability}");
    println!("inline_bytes_max            {}", options.inline_bytes_max);
    println!("small_file_bytes_max        {}", options.small_file_bytes_max);
    println!("meta_partition_entries_max  {}", options.meta_partition_entries_max);
    println!(
        "partitions                  {} meta, {} data",
        summary.meta_partitions, summary.data_partitions
    );
    Ok(())
}

fn key(cluster: &Cluster, name: String, json: bool) -> Outcome {
    match ask(cluster, &ManagerRequest::GetVolumeKey { name })? {
        ManagerAnswer::Key(key) if json => print_json(&key),
        ManagerAnswer::Key(key) => {
            println!("{key}");
            Ok(())
        }
        other => Err(unexpected(&other)),
    }
}

fn confirm_deletion(summary: &VolumeSummary, yes: bool) -> Outcome {
    let (name, files) = (&summary.volume.name, summary.inodes);
    let question = format!("Delete volume {name:?} with {files} files for ever? Type its name:");
    let refusal = format!("volume {name:?} with {files} files was not deleted");
    confirm(yes, &question, name, &refusal)
}
