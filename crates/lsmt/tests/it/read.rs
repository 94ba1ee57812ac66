//! Every sealed layer of the reference implementation is read right.

use std::sync::Arc;

use lsmt::blob::{open_layer, Wrapping};
use lsmt::cache::ChainCache;
use lsmt::layer::{Layer, LayerKey};
use lsmt::source::ReadAt;
use lsmt::stack::Stack;
use lsmt::{blob, trace, warp, Error};
use sha2::{Digest, Sha256};

use crate::support::*;

fn manifest() -> serde_json::Value {
    serde_json::from_slice(&bytes("MANIFEST.json")).unwrap()
}

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

#[test]
fn every_sealed_layer_has_the_recorded_content_and_header() {
    let mut seen = 0;
    for (name, facts) in manifest()["files"].as_object().unwrap() {
        let (Some(facts), Some(digest)) = (facts.get("lsmt"), facts.get("flat_image_sha256"))
        else {
            continue;
        };
        let layer = layer(name);
        let identity = layer.identity();
        assert_eq!(
            layer.virtual_size(),
            facts["virtual_size"].as_u64().unwrap(),
            "{name}"
        );
        assert_eq!(
            layer.index().len() as u64,
            facts["valid_entries"].as_u64().unwrap(),
            "{name}"
        );
        assert_eq!(
            identity.uuid,
            facts["uuid"]
                .as_str()
                .unwrap()
                .parse::<uuid::Uuid>()
                .unwrap(),
            "{name}"
        );
        assert_eq!(
            identity.parent,
            facts["parent_uuid"]
                .as_str()
                .unwrap()
                .parse::<uuid::Uuid>()
                .unwrap(),
            "{name}"
        );
        assert_eq!(
            identity.tag,
            facts["tag"].as_str().unwrap().as_bytes(),
            "{name}"
        );
        let flat = content(&Stack::build([layer]).unwrap());
        assert_eq!(sha256(&flat), digest.as_str().unwrap(), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 19, "layers in the manifest");
}

#[test]
fn layers_hold_what_was_written() {
    for name in [
        "l00-empty",
        "l01-one4k",
        "l02-mixed",
        "l05-sparse",
        "l07-long",
        "l08-300seg",
        "l09-256seg",
    ] {
        let (size, ops) = ops(&format!("lsmt/{name}.ops.json"));
        let found = content(&stack(&[&format!("lsmt/{name}.commit")]));
        assert_same(&found, &flat(size, &ops), name);
    }
    for (layer, image) in [
        ("l02-mixed.commit", "l02-mixed.img"),
        ("l03-sealed.data", "l02-mixed.img"),
        ("l06-sparsesealed.data", "l05-sparse.img"),
    ] {
        let found = content(&stack(&[&format!("lsmt/{layer}")]));
        assert_same(&found, &bytes(&format!("lsmt/{image}")), layer);
    }
}

#[test]
fn stacks_read_like_one_disk() {
    let names = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
        "lsmt/s3-upper.data",
    ];
    let three = stack(&names[..3]);
    assert_same(
        &content(&three),
        &bytes("lsmt/s-stack3.img"),
        "three layers",
    );
    assert_same(
        &content(&stack(&["lsmt/s-merged.commit"])),
        &bytes("lsmt/s-stack3.img"),
        "merged",
    );
    let four = stack(&names);
    four.check_parents().unwrap();
    assert_same(&content(&four), &bytes("lsmt/s-stack4.img"), "four layers");
    assert_same(
        &content(&stack(&["lsmt/s-flatten5.commit"])),
        &bytes("lsmt/s-stack5.img"),
        "flattened",
    );
    let swapped = stack(&[names[1], names[0], names[2]]);
    assert!(matches!(swapped.check_parents(), Err(Error::Format { .. })));
    // Unmerged runs read the same.
    let mut pushed = Stack::default();
    for name in names {
        pushed = pushed.push(layer(name)).unwrap();
    }
    assert_eq!(pushed.run_lengths().len(), 4);
    assert_same(&content(&pushed), &bytes("lsmt/s-stack4.img"), "unmerged");
    for (offset, length) in [
        (0, 1),
        (511, 3),
        (65535, 4097),
        (100_001, 300_000),
        (8_388_600, 8),
    ] {
        let mut part = vec![0; length];
        pushed.read_exact_at(&mut part, offset).unwrap();
        assert_same(
            &part,
            &bytes("lsmt/s-stack4.img")[offset as usize..][..length],
            "an unaligned part",
        );
    }
    assert_eq!(
        pushed.read_at(&mut [0; 16], 8_388_608 - 6).unwrap(),
        6,
        "reads end with the disk"
    );
}

#[test]
fn converted_images_in_all_their_wrapping() {
    let image = bytes("lsmt/e-ext4-stack.img");
    assert_same(
        &content(&stack(&["lsmt/e0-ext4.commit", "lsmt/e1-ext4.commit"])),
        &image,
        "plain",
    );
    let mut wrapped = Stack::default();
    for name in ["lsmt/e0-ext4.obd.tar", "lsmt/e1-ext4.obd.tar"] {
        let (plain, wrapping) = blob::unwrap(source(name)).unwrap();
        assert_eq!(
            wrapping,
            Wrapping {
                tar: true,
                zfile: true
            }
        );
        assert_eq!(
            content(&*plain),
            bytes(&name.replace("obd.tar", "commit")),
            "{name}"
        );
        wrapped = wrapped
            .push(Arc::new(
                open_layer(source(name), LayerKey::unique()).unwrap(),
            ))
            .unwrap();
    }
    assert_same(&content(&wrapped), &image, "tar and zfile");
}

#[test]
fn the_published_base_layer_is_readable_despite_its_garbage_header() {
    let layer = open_layer(source("real/ext4_64"), LayerKey::unique()).unwrap();
    assert_eq!(layer.index().len(), 8323);
    assert_eq!(layer.virtual_size(), 64 << 30);
    assert!(layer.identity().uuid.to_string().starts_with("c02fb491"));
    // The flat image is 64 GiB, nearly all of it holes: hash what is mapped, and check the superblock.
    let stack = Stack::build([Arc::new(layer)]).unwrap();
    let mut superblock = [0; 1024];
    stack.read_exact_at(&mut superblock, 1024).unwrap();
    assert_eq!(superblock[56..58], [0x53, 0xef], "ext4 magic");
    let blocks = u32::from_le_bytes(superblock[4..8].try_into().unwrap());
    assert_eq!(u64::from(blocks) * 4096, 64 << 30);
    let index = stack.merged_index().unwrap();
    let mut mapped = 0;
    for entry in index.entries().iter().filter(|e| !e.is_zeroed()) {
        let mut data = vec![0; entry.len() as usize * 512];
        stack
            .read_exact_at(&mut data, entry.offset() * 512)
            .unwrap();
        mapped += data.len();
    }
    assert_eq!(mapped as u64, index.sectors().0 * 512);
}

#[test]
fn warp_layers_take_data_from_two_sources() {
    let meta = source("lsmt/t0-warp.commit");
    let warped = warp::open(
        meta.clone(),
        source("lsmt/t0-target.tar"),
        LayerKey::unique(),
    )
    .unwrap();
    assert_same(
        &content(&Stack::build([Arc::new(warped)]).unwrap()),
        &bytes("lsmt/t0-warp.img"),
        "warp",
    );
    // In a stack, its two sources take two slots.
    let layers = [
        layer("lsmt/l05-sparse.commit"),
        Arc::new(
            warp::open(
                meta.clone(),
                source("lsmt/t0-target.tar"),
                LayerKey::unique(),
            )
            .unwrap(),
        ),
        layer("lsmt/l01-one4k.commit"),
    ];
    let stack = Stack::build(layers).unwrap();
    assert_eq!(stack.sources().len(), 4);
    let mut expected = vec![0; 16 << 20];
    expected[..1 << 20].copy_from_slice(&bytes("lsmt/l05-sparse.img"));
    for (at, sectors) in [(0, 16), (2048, 128), (4096, 8), (8192, 8)] {
        let range = at * 512..(at + sectors) * 512;
        expected[range.clone()].copy_from_slice(&bytes("lsmt/t0-warp.img")[range]);
    }
    let (size, ops) = ops("lsmt/l01-one4k.ops.json");
    let top = flat(size, &ops);
    let op = &ops[0];
    let range = op.offset as usize..(op.offset + op.length) as usize;
    expected[range.clone()].copy_from_slice(&top[range]);
    assert_same(&content(&stack), &expected, "warp between layers");
    // Without its tar it is refused, and with a tar that is too short as well.
    assert!(Layer::open(meta.clone(), LayerKey::unique()).is_err());
    let short: Arc<dyn ReadAt> = Arc::new(vec![0; 207 * 512]);
    assert!(matches!(
        warp::open(meta, short, LayerKey::unique()),
        Err(Error::Format { .. })
    ));
}

#[test]
fn traces_are_read_with_either_checksum_and_written_with_the_original_one() {
    let original = bytes("lsmt/p0-trace.synth");
    let records = trace::read(&original).unwrap();
    assert_eq!(records.len(), 4);
    assert_eq!(
        records[1],
        trace::Record {
            layer: 0,
            offset: 1 << 20,
            count: 64 << 10
        }
    );
    assert_eq!(
        records[3],
        trace::Record {
            layer: 2,
            offset: 1 << 30,
            count: 1 << 20
        }
    );
    let mut written = Vec::new();
    trace::write(&records, &mut written).unwrap();
    assert_eq!(written, original);
    let mut other = original.clone();
    let inverted = crc32c::crc32c(&original[24..]);
    other[16..20].copy_from_slice(&inverted.to_le_bytes());
    assert_eq!(trace::read(&other).unwrap(), records);
    other[16] ^= 1;
    assert!(matches!(trace::read(&other), Err(Error::Format { .. })));
    assert!(trace::read(&original[..100].to_vec()).is_err());
    assert_eq!(trace::read(&Vec::new()).unwrap(), []);
}

#[test]
fn forks_of_a_chain_share_its_index() {
    let cache = ChainCache::new(0);
    let names = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
    ];
    let keys = names.map(|name| LayerKey::from_digest(Sha256::digest(bytes(name)).into()));
    let mut opened = Vec::new();
    let mut open = |i: usize| {
        opened.push(i);
        Layer::open(source(names[i]), keys[i]).map(Arc::new)
    };
    let two = cache.stack(&keys[..2], &mut open).unwrap();
    let three = cache.stack(&keys, &mut open).unwrap();
    let again = cache.stack(&keys, &mut open).unwrap();
    assert!(Arc::ptr_eq(&three, &again));
    assert_eq!(opened, [0, 1, 2], "each layer is opened once");
    assert_same(
        &content(&*three),
        &bytes("lsmt/s-stack3.img"),
        "through the cache",
    );
    let id = three.id();
    assert_eq!(cache.get(id).unwrap().id(), id);
    drop((two, three, again));
    assert!(cache.get(id).is_none(), "a chain nobody uses is let go");
    let keeping = ChainCache::new(1);
    drop(
        keeping
            .stack(&keys, |i| {
                Layer::open(source(names[i]), keys[i]).map(Arc::new)
            })
            .unwrap(),
    );
    assert!(
        keeping.get(id).is_some(),
        "unless it is among the recent ones"
    );
}
