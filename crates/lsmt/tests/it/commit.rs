//! Dense layers: equal to the reference's to the byte, and smaller when asked for.

use std::fs::File;
use std::sync::Arc;

use lsmt::commit::{self, Elide, Layout, Options, Report};
use lsmt::entry::Entry;
use lsmt::header::Header;
use lsmt::index::Index;
use lsmt::layer::{Layer, LayerKey};
use lsmt::pair::Repair;
use lsmt::source::ReadAt;
use lsmt::sparse;
use lsmt::stack::Stack;
use lsmt::trace;

use crate::pair::open;
use crate::support::*;

/// Commits a layer under the ids of a reference commit.
fn like(layer: &Layer, reference: &[u8]) -> Vec<u8> {
    let header = Header::decode(reference[..4096].try_into().unwrap(), "fixture").unwrap();
    let options = Options {
        identity: header.identity,
        virtual_size: header.virtual_size,
        layout: Layout::Reference,
        ..Options::default()
    };
    let mut out = Vec::new();
    let report = commit::commit(layer.index(), layer.sources(), &options, &mut out).unwrap();
    assert_eq!(report.file, out.len() as u64);
    out
}

#[test]
fn commits_equal_the_references_to_the_byte() {
    let pairs = [
        "l00-empty",
        "l01-one4k",
        "l02-mixed",
        "l07-long",
        "l08-300seg",
        "l09-256seg",
        "s0-base",
        "s1-mid",
        "s2-top",
        "e0-ext4",
        "e1-ext4",
    ];
    for name in pairs {
        let reference = bytes(&format!("lsmt/{name}.commit"));
        let pair = open(&format!("lsmt/{name}"), Repair::Refuse).unwrap();
        assert_same(&like(&pair.layer, &reference), &reference, name);
    }
    // A sealed upper, compacted later.
    let reference = bytes("lsmt/l03-sealed.commit");
    assert_same(
        &like(&layer("lsmt/l03-sealed.data"), &reference),
        &reference,
        "l03-sealed",
    );
}

#[test]
fn sparse_uppers_commit_to_the_same_disk() {
    let reference = bytes("lsmt/l05-sparse.commit");
    let live =
        sparse::open_bottom(Arc::new(File::open(path("lsmt/l05-sparse.data")).unwrap())).unwrap();
    for layer in [
        live,
        Layer::open(source("lsmt/l06-sparsesealed.data"), LayerKey::unique()).unwrap(),
    ] {
        let ours = like(&layer, &reference);
        assert_same(
            &content(&stack_of(ours)),
            &bytes("lsmt/l05-sparse.img"),
            "sparse",
        );
    }
}

/// The file with source numbers removed from its index; our writer never leaves them there.
fn without_tags(mut file: Vec<u8>) -> Vec<u8> {
    let trailer = Header::decode(file[file.len() - 4096..].try_into().unwrap(), "fixture").unwrap();
    let index = trailer.index_offset as usize;
    for at in (index..index + trailer.index_size as usize * 16).step_by(16) {
        let entry = Entry::decode(&file[at..at + 16]);
        file[at..at + 16].copy_from_slice(&entry.with_slot(0).encode());
    }
    file
}

#[test]
fn merge_and_flatten_equal_the_references() {
    let names = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
        "lsmt/s3-upper.data",
    ];
    let reference = without_tags(bytes("lsmt/s-merged.commit"));
    let three = stack(&names[..3]);
    let merged = Layer::new(
        Default::default(),
        three.virtual_size(),
        Index::new(three.merged_index().unwrap().entries().to_vec()).unwrap(),
        three.sources().to_vec(),
    )
    .unwrap();
    assert_same(&like(&merged, &reference), &reference, "merge");

    let reference = without_tags(bytes("lsmt/s-flatten5.commit"));
    let header = Header::decode(reference[..4096].try_into().unwrap(), "fixture").unwrap();
    let five = stack(&names)
        .push(Arc::new(
            open("lsmt/s4-upper", Repair::Refuse).unwrap().layer,
        ))
        .unwrap();
    let options = Options {
        identity: header.identity,
        virtual_size: header.virtual_size,
        layout: Layout::Reference,
        ..Options::default()
    };
    let mut out = Vec::new();
    commit::flatten(&five, &options, &mut out).unwrap();
    assert_same(&out, &reference, "flatten");
}

fn stack_of(file: Vec<u8>) -> Stack {
    Stack::build([Arc::new(
        Layer::open(Arc::new(file), LayerKey::unique()).unwrap(),
    )])
    .unwrap()
}

fn dense(stack: &Stack, options: Options<'_>) -> (Vec<u8>, Report) {
    let mut out = Vec::new();
    let options = Options {
        virtual_size: stack.virtual_size(),
        ..options
    };
    let report = commit::flatten(stack, &options, &mut out).unwrap();
    assert_eq!(out.len() as u64, report.file);
    (out, report)
}

#[test]
fn zeros_and_unchanged_blocks_are_left_out() {
    let base = stack(&["lsmt/e0-ext4.commit"]);
    let whole = content(&base);
    let (plain, report) = dense(&base, Options::default());
    assert_eq!(report.elided, 0);
    let (smaller, zeros) = dense(
        &base,
        Options {
            elide: Elide::Zeros,
            ..Options::default()
        },
    );
    let (smallest, bottom) = dense(
        &base,
        Options {
            elide: Elide::ZerosAtBottom,
            ..Options::default()
        },
    );
    assert!(zeros.elided > 0 && zeros.data + zeros.elided == report.data);
    assert_eq!((bottom.data, bottom.elided), (zeros.data, zeros.elided));
    assert!(bottom.entries < zeros.entries);
    for file in [plain, smaller, smallest] {
        assert_same(&content(&stack_of(file)), &whole, "with and without zeros");
    }

    // A layer that rewrites the whole disk with few changes shrinks to the changes.
    let mut changed = whole.clone();
    changed[300 * 4096 + 7] ^= 1;
    changed[..4096].fill(0);
    changed[9 * 4096..11 * 4096].fill(0x77);
    let rewrite = Index::new(vec![Entry::data(0, 2048, 0, 0)]).unwrap();
    let sources: [Arc<dyn ReadAt>; 1] = [Arc::new(changed.clone())];
    let options = Options {
        virtual_size: base.virtual_size(),
        elide: Elide::Unchanged(&base),
        ..Options::default()
    };
    let mut out = Vec::new();
    let report = commit::commit(&rewrite, &sources, &options, &mut out).unwrap();
    // Every touched block is at most the four changed ones; the first 4 KiB of an ext4 disk hold the superblock.
    assert!(
        report.data <= 3 * 4096 && report.data >= 2 * 4096,
        "{report:?}"
    );
    let both = base
        .push(Arc::new(
            Layer::open(Arc::new(out), LayerKey::unique()).unwrap(),
        ))
        .unwrap();
    let mut expected = whole;
    expected[..1 << 20].copy_from_slice(&changed[..1 << 20]);
    assert_same(&content(&both), &expected, "unchanged blocks dropped");
}

#[test]
fn data_can_follow_the_order_of_first_use() {
    let names = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
    ];
    let stack = stack(&names);
    // Out of order, overlapping, partly unmapped, beyond the end.
    let order = [
        8192..8200,
        100..300,
        8196..8210,
        0..16,
        250..260,
        3000..5000,
        16380..99999,
    ];
    for elide in [Elide::Nothing, Elide::Zeros, Elide::ZerosAtBottom] {
        let (file, _) = dense(
            &stack,
            Options {
                order: &order,
                elide,
                ..Options::default()
            },
        );
        let layer = Layer::open(Arc::new(file.clone()), LayerKey::unique()).unwrap();
        assert_eq!(
            layer.index().get(8192).unwrap().source(),
            8,
            "first used, first stored"
        );
        assert_eq!(layer.index().get(100).unwrap().source(), 16);
        assert_same(
            &content(&stack_of(file)),
            &bytes("lsmt/s-stack3.img"),
            "in order of use",
        );
    }
}

#[test]
fn a_smaller_disk_drops_what_is_beyond() {
    let stack = stack(&["lsmt/s0-base.commit"]);
    let options = Options {
        virtual_size: 100 * 512,
        ..Options::default()
    };
    let mut out = Vec::new();
    commit::flatten(&stack, &options, &mut out).unwrap();
    assert_same(
        &content(&stack_of(out)),
        &content(&stack)[..100 * 512],
        "a shrunk disk",
    );
}

#[test]
fn a_recorded_start_is_one_sequential_read() {
    let names = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
    ];
    let stack = stack(&names);
    // A start that reads two places of the top layer, then the tail of the base, then something hidden there.
    let source =
        |layer: &Stack, sector: u64| layer.layers()[0].index().get(sector).unwrap().source() * 512;
    let one = |i: usize| Stack::build([stack.layers()[i].clone()]).unwrap();
    let records = [
        trace::Record {
            layer: 2,
            offset: source(&one(2), 10240),
            count: 4096,
        },
        trace::Record {
            layer: 2,
            offset: source(&one(2), 4352),
            count: 4096,
        },
        trace::Record {
            layer: 0,
            offset: source(&one(0), 16376) + 512,
            count: 1000,
        },
        trace::Record {
            layer: 0,
            offset: source(&one(0), 0) + 250 * 512,
            count: 4096,
        },
        trace::Record {
            layer: 1,
            offset: 102_400,
            count: 4096,
        },
    ];
    let order = trace::image_ranges(&records, &stack).unwrap();
    assert_eq!(
        order,
        [10240..10248, 4352..4360, 16377..16379],
        "neither hidden data nor an index"
    );
    let (file, _) = dense(
        &stack,
        Options {
            order: &order,
            ..Options::default()
        },
    );
    let layer = Layer::open(Arc::new(file.clone()), LayerKey::unique()).unwrap();
    let sources: Vec<_> = order
        .iter()
        .map(|r| layer.index().get(r.start).unwrap().source())
        .collect();
    assert_eq!(sources, [8, 16, 24]);
    assert_same(
        &content(&stack_of(file)),
        &bytes("lsmt/s-stack3.img"),
        "in recorded order",
    );
    let stranger = trace::Record {
        layer: 3,
        offset: 0,
        count: 1,
    };
    assert!(trace::image_ranges(&[stranger], &stack).is_err());
}
