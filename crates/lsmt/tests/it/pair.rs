//! Append and sparse uppers of the open format: read, written to the byte, and refused or repaired after crashes.

use std::fs::File;
use std::sync::Arc;

use lsmt::header::{Header, Identity};
use lsmt::layer::{Layer, LayerKey};
use lsmt::pair::{self, Pair, PairOptions, PairWriter, Repair};
use lsmt::stack::Stack;
use lsmt::{sparse, Error};

use crate::support::*;

pub fn open(name: &str, repair: Repair) -> lsmt::Result<Pair> {
    pair::read(
        source(&format!("{name}.data")),
        &*source(&format!("{name}.index")),
        repair,
    )
}

fn alone(pair: Pair) -> Vec<u8> {
    content(&Stack::build([Arc::new(pair.layer)]).unwrap())
}

#[test]
fn live_uppers_hold_what_was_written() {
    for name in [
        "l00-empty",
        "l01-one4k",
        "l02-mixed",
        "l07-long",
        "l08-300seg",
        "l09-256seg",
        "s0-base",
    ] {
        let (size, ops) = ops(&format!("lsmt/{name}.ops.json"));
        let pair = open(&format!("lsmt/{name}"), Repair::Refuse).unwrap();
        assert_eq!(pair.cut, 0);
        assert_same(&alone(pair), &flat(size, &ops), name);
    }
    let grouped = open("lsmt/l04-groupcommit", Repair::Refuse).unwrap();
    assert_eq!(
        grouped.entries, 13,
        "padding inside the index does not count"
    );
    assert_same(
        &alone(grouped),
        &bytes("lsmt/l02-mixed.img"),
        "group commit",
    );
    let below = [
        "lsmt/s0-base.commit",
        "lsmt/s1-mid.commit",
        "lsmt/s2-top.commit",
        "lsmt/s3-upper.data",
    ];
    let live = open("lsmt/s4-upper", Repair::Refuse).unwrap();
    let five = stack(&below).push(Arc::new(live.layer)).unwrap();
    assert_same(
        &content(&five),
        &bytes("lsmt/s-stack5.img"),
        "five layers, the top one live",
    );
}

/// Replays recorded operations. The reference flushed at the end.
fn replay(name: &str, like: &str, options: PairOptions) -> (PairWriter, File, File) {
    let header = Header::decode(
        bytes(&format!("lsmt/{like}.data"))[..4096]
            .try_into()
            .unwrap(),
        "fixture",
    )
    .unwrap();
    let (size, ops) = ops(&format!("lsmt/{name}.ops.json"));
    let (data, index) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let (d, i) = (data.try_clone().unwrap(), index.try_clone().unwrap());
    let mut writer = PairWriter::create(d, i, header.identity, size, options).unwrap();
    for op in ops {
        match op.payload() {
            Some(payload) => writer.write(op.offset, &payload).unwrap(),
            None => writer.discard(op.offset, op.length).unwrap(),
        }
    }
    (writer, data, index)
}

fn all(file: &File) -> Vec<u8> {
    let size = file.metadata().unwrap().len();
    content(&lsmt::source::FileSource::with_size(
        Arc::new(file.try_clone().unwrap()),
        size,
    ))
}

#[test]
fn replayed_operations_give_the_same_files() {
    let names = [
        "l00-empty",
        "l01-one4k",
        "l02-mixed",
        "l07-long",
        "l08-300seg",
        "l09-256seg",
        "s0-base",
        "s1-mid",
        "s2-top",
        "s4-upper",
    ];
    for name in names {
        let slot = if name == "s4-upper" { 4 } else { 0 };
        let (mut writer, data, index) = replay(
            name,
            name,
            PairOptions {
                slot,
                ..PairOptions::default()
            },
        );
        writer.flush().unwrap();
        assert_same(&all(&data), &bytes(&format!("lsmt/{name}.data")), name);
        assert_same(&all(&index), &bytes(&format!("lsmt/{name}.index")), name);
    }
    let (mut writer, data, index) = replay(
        "l02-mixed",
        "l04-groupcommit",
        PairOptions {
            group_commit: 4096,
            slot: 0,
        },
    );
    assert_eq!(
        index.metadata().unwrap().len(),
        4096,
        "entries wait for their group"
    );
    writer.flush().unwrap();
    assert_same(
        &all(&data),
        &bytes("lsmt/l04-groupcommit.data"),
        "group commit",
    );
    assert_same(
        &all(&index),
        &bytes("lsmt/l04-groupcommit.index"),
        "group commit",
    );
}

#[test]
fn sealing_in_place_gives_the_same_file() {
    // The padding between index and trailer is uninitialised memory in the original.
    for (ops, like, index_end) in [
        ("l02-mixed", "l03-sealed", 223_744 + 18 * 16),
        ("s3-upper", "s3-upper", 20_480 + 4 * 16),
    ] {
        let (writer, _, _) = replay(ops, like, PairOptions::default());
        let sealed = all(&writer.seal().unwrap());
        let original = bytes(&format!("lsmt/{like}.data"));
        assert_eq!(sealed.len(), original.len());
        assert_same(&sealed[..index_end], &original[..index_end], like);
        let trailer = sealed.len() - 4096;
        assert!(sealed[index_end..trailer].iter().all(|b| *b == 0));
        assert_same(&sealed[trailer..], &original[trailer..], like);
        Layer::open(Arc::new(sealed), LayerKey::unique()).unwrap();
    }
}

#[test]
fn writes_outside_the_disk_or_of_half_sectors_are_refused() {
    let (d, i) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let mut writer =
        PairWriter::create(d, i, Identity::default(), 1 << 20, PairOptions::default()).unwrap();
    for (offset, length) in [
        (1 << 20, 512),
        ((1 << 20) - 512, 1024),
        (100, 512),
        (0, 100),
        (u64::MAX - 511, 512),
    ] {
        assert!(
            matches!(writer.discard(offset, length), Err(Error::Argument(_))),
            "{length} at {offset}"
        );
    }
}

#[test]
fn an_index_ahead_of_its_data_is_refused_or_cut() {
    let error = open("hazards/cr", Repair::Refuse).unwrap_err();
    assert!(matches!(error, Error::Torn { good: 1, .. }), "{error}");
    assert!(error.to_string().contains("repair"), "{error}");
    let repaired = open("hazards/cr", Repair::Cut).unwrap();
    assert_eq!((repaired.entries, repaired.cut), (1, 16));
    assert_eq!(repaired.layer.index().sectors().0, 128);
}

#[test]
fn an_index_cut_inside_an_entry_is_refused_or_cut() {
    assert!(matches!(
        open("hazards/tr", Repair::Refuse),
        Err(Error::Torn { good: 1, .. })
    ));
    let repaired = open("hazards/tr", Repair::Cut).unwrap();
    assert_eq!(
        (repaired.entries, repaired.cut),
        (1, 23),
        "what follows the torn entry is out of step"
    );
}

#[test]
fn an_index_that_ends_in_zeros_is_refused_or_cut() {
    assert!(matches!(
        open("hazards/zr", Repair::Refuse),
        Err(Error::Torn { good: 1, .. })
    ));
    let repaired = open("hazards/zr", Repair::Cut).unwrap();
    assert_eq!((repaired.entries, repaired.cut), (1, 64));
}

#[test]
fn every_truncation_of_an_index_gives_the_disk_at_that_time() {
    let (size, ops) = ops("lsmt/l02-mixed.ops.json");
    let (data, index) = (source("lsmt/l02-mixed.data"), bytes("lsmt/l02-mixed.index"));
    for length in 4096..=index.len() {
        let cut = index[..length].to_vec();
        let whole = (length - 4096) / 16;
        let strict = pair::read(data.clone(), &cut, Repair::Refuse);
        assert_eq!(strict.is_ok(), (length - 4096) % 16 == 0, "{length} bytes");
        let pair = pair::read(data.clone(), &cut, Repair::Cut).unwrap();
        assert_eq!(pair.entries, whole as u64);
        if length % 16 == 8 {
            assert_same(
                &alone(pair),
                &flat(size, &ops[..whole]),
                "a truncated index",
            );
        }
    }
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    assert!(matches!(
        pair::read(
            source("lsmt/s0-base.data"),
            &*source("lsmt/s1-mid.index"),
            Repair::Cut
        ),
        Err(Error::Format { .. })
    ));
    assert!(pair::read(
        source("lsmt/s0-base.index"),
        &*source("lsmt/s0-base.data"),
        Repair::Cut
    )
    .is_err());
    assert!(pair::read(
        source("lsmt/l05-sparse.data"),
        &*source("lsmt/l01-one4k.index"),
        Repair::Cut
    )
    .is_err());
}

#[test]
fn a_sparse_upper_is_read_as_bottom_layer() {
    let open = |name: &str| {
        let layer = sparse::open_bottom(Arc::new(File::open(path(name)).unwrap())).unwrap();
        content(&Stack::build([Arc::new(layer)]).unwrap())
    };
    assert_same(
        &open("lsmt/l05-sparse.data"),
        &bytes("lsmt/l05-sparse.img"),
        "sparse",
    );
    assert_eq!(open("hazards/sp.data").len(), 1 << 20);
    assert!(
        sparse::open_bottom(Arc::new(File::open(path("lsmt/l01-one4k.data")).unwrap())).is_err()
    );
}

#[test]
fn the_append_form_keeps_what_the_sparse_form_loses() {
    // The same operations over the same lower layer: 512 bytes written, one discard, one write and discard.
    let lower = content(&stack(&["hazards/lo.commit"]));
    let appended = open("hazards/ap", Repair::Refuse).unwrap();
    let found = content(
        &stack(&["hazards/lo.commit"])
            .push(Arc::new(appended.layer))
            .unwrap(),
    );
    assert_ne!(found[512..1024], lower[512..1024], "the written sector");
    assert_eq!(
        found[1024..4096],
        lower[1024..4096],
        "its neighbours in the page"
    );
    assert!(found[8192..12288].iter().all(|b| *b == 0), "the discard");
    assert!(lower[8192..12288].iter().any(|b| *b != 0));
}
