//! Checkpoints of heads whose vocabulary is cut: ranks as threads save and load, files are damaged, and ranks fail.

#[path = "common/checkpoint.rs"]
mod checkpoint;
#[path = "common/ranks.rs"]
mod ranks;
#[path = "common/values.rs"]
mod values;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use approx::assert_abs_diff_eq;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use checkpoint::{
    assert_rank_loads, assert_same, bits, loads_with_another_cut, rank_rows, tensor, whole, Folder, Tensors, DTYPES,
    INDEX, VOCAB,
};
use mos_head::distributed::{save_sharded, Collectives, ShardedCheckpoint, VocabParallel, VocabShard};
use mos_head::{Error, LossOptions, MixtureConfig, MixtureOfSoftmaxes, OutputLayer, Result};
use ranks::on_ranks;

impl Folder {
    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The names of all files, in alphabetical order.
    fn list(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn all_tensors((rows, replicated): &(Tensors, Tensors)) -> Tensors {
    rows.iter().chain(replicated).map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
}

/// Saves whole tensors on some ranks; `change` changes what a rank saves.
fn save_changed(
    index: &Path,
    ranks: usize,
    (rows, replicated): &(Tensors, Tensors),
    change: impl Fn(usize, &mut Tensors, &mut Tensors) + Sync,
) -> Vec<Result<()>> {
    on_ranks(ranks, |collectives| {
        let rank = collectives.rank();
        let shard = VocabShard::new(collectives, VOCAB)?;
        let (mut rows, mut replicated) = (rank_rows(rows, &shard.range()), replicated.clone());
        change(rank, &mut rows, &mut replicated);
        save_sharded(&shard, index, &rows, &replicated)
    })
}

fn save(index: &Path, ranks: usize, whole: &(Tensors, Tensors)) -> Vec<Result<()>> {
    save_changed(index, ranks, whole, |_, _, _| ())
}

fn saved(index: &Path, ranks: usize, whole: &(Tensors, Tensors)) {
    save(index, ranks, whole).into_iter().for_each(|result| result.unwrap());
}

/// Checks what some ranks load.
fn assert_loads(path: &Path, ranks: usize, whole: &(Tensors, Tensors)) {
    on_ranks(ranks, |collectives| {
        assert_rank_loads(&VocabShard::new(collectives, VOCAB).unwrap(), path, whole).unwrap();
    });
}

/// The message of an error of a checkpoint, which names the file.
fn message<T>(result: Result<T>, file: &str) -> String {
    match result {
        Err(error @ Error::Checkpoint { .. }) => {
            assert!(error.to_string().contains(file), "{error} does not name {file}");
            error.to_string()
        }
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("no error of {file}"),
    }
}

#[test]
fn every_cut_loads_as_every_other() {
    let folder = Folder::new("cuts");
    for (dtype, ranks) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 2), (dtype, 3)]) {
        let whole = whole(ranks, dtype);
        saved(&folder.file(INDEX), ranks, &whole);
        (1..=4).for_each(|others| assert_loads(&folder.file(INDEX), others, &whole));
        // Each save leaves its own files alone.
        assert_eq!(folder.list().len(), ranks + 1, "{:?}", folder.list());
    }
}

#[test]
fn a_shard_holds_its_own_rows_alone() {
    let folder = Folder::new("own");
    let whole = whole(1, DType::F32);
    saved(&folder.file(INDEX), 3, &whole);
    assert_eq!(
        folder.list(),
        [
            "head.1-00001-of-00003.safetensors",
            "head.1-00002-of-00003.safetensors",
            "head.1-00003-of-00003.safetensors",
            INDEX
        ]
    );
    let second =
        candle_core::safetensors::load(folder.file("head.1-00002-of-00003.safetensors"), &Device::Cpu).unwrap();
    let mut names: Vec<&String> = second.keys().collect();
    names.sort();
    assert_eq!(names, ["cube.rows.3-7-of-11", "decoder.bias.rows.3-7-of-11", "decoder.weight.rows.3-7-of-11"]);
    assert_same(&second["decoder.weight.rows.3-7-of-11"], &whole.0["decoder.weight"].narrow(0, 3, 4).unwrap());
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.file(INDEX)).unwrap()).unwrap();
    let bytes: usize = all_tensors(&whole).values().map(|tensor| bits(tensor).len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), 3 * 3 + 2);
    assert_eq!(index["weight_map"]["scale"], "head.1-00001-of-00003.safetensors");
}

#[test]
fn a_save_loads_with_another_cut() {
    for ranks in 1..=4 {
        on_ranks(ranks, |ranks| loads_with_another_cut(&ranks)).into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn a_merged_file_holds_the_whole() {
    let folder = Folder::new("merge");
    for dtype in DTYPES {
        let whole = whole(5, dtype);
        saved(&folder.file(INDEX), 3, &whole);
        // The second merge replaces the file that it reads nothing of.
        for _ in 0..2 {
            ShardedCheckpoint::open(folder.file(INDEX)).unwrap().merge(folder.file("whole.safetensors")).unwrap();
        }
        let merged = candle_core::safetensors::load(folder.file("whole.safetensors"), &Device::Cpu).unwrap();
        let expected = all_tensors(&whole);
        assert_eq!(merged.len(), expected.len());
        merged.iter().for_each(|(name, tensor)| assert_same(tensor, &expected[name]));
        // SAFETY: no one changes the file while it is mapped.
        let vb =
            unsafe { VarBuilder::from_mmaped_safetensors(&[folder.file("whole.safetensors")], dtype, &Device::Cpu) };
        let vb = vb.unwrap();
        expected.iter().for_each(|(name, tensor)| assert_same(&vb.get(tensor.shape(), name).unwrap(), tensor));
        let bytes = std::fs::read(folder.file("whole.safetensors")).unwrap();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        expected.iter().for_each(|(name, tensor)| assert_eq!(read.tensor(name).unwrap().data(), bits(tensor)));
        assert_loads(&folder.file("whole.safetensors"), 3, &whole);
        assert!(!folder.list().iter().any(|name| name.ends_with(".partial")));
    }
}

#[test]
fn a_merge_writes_no_file_of_its_checkpoint() {
    let folder = Folder::new("merge-onto-itself");
    let whole = whole(5, DType::F32);
    saved(&folder.file(INDEX), 2, &whole);
    let checkpoint = ShardedCheckpoint::open(folder.file(INDEX)).unwrap();
    for name in [INDEX, "head.1-00002-of-00002.safetensors"] {
        message(checkpoint.merge(folder.file(name)), "a file that is not part of the checkpoint");
    }
    assert_loads(&folder.file(INDEX), 3, &whole);
}

#[test]
fn a_merge_that_fails_leaves_the_file_before() {
    let folder = Folder::new("merge-fails");
    let whole = whole(5, DType::F32);
    saved(&folder.file(INDEX), 2, &whole);
    let checkpoint = ShardedCheckpoint::open(folder.file(INDEX)).unwrap();
    checkpoint.merge(folder.file("whole.safetensors")).unwrap();
    let shard = folder.file("head.1-00002-of-00002.safetensors");
    let shard = std::fs::OpenOptions::new().write(true).open(&shard).unwrap();
    shard.set_len(shard.metadata().unwrap().len() - 10).unwrap();
    message(checkpoint.merge(folder.file("whole.safetensors")), "head.1-00002-of-00002.safetensors");
    assert_loads(&folder.file("whole.safetensors"), 1, &whole);
    message(checkpoint.merge(folder.file("nowhere/whole.safetensors")), "whole.safetensors");
    assert!(!folder.list().iter().any(|name| name.ends_with(".partial")));
}

#[test]
fn tensors_of_many_blocks_are_saved_merged_and_loaded() {
    let folder = Folder::new("blocks");
    let values = Tensor::arange(0u32, 11 * 250_000, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    // A transposed view, whose rows are not contiguous.
    let wide = values.reshape((250_000, VOCAB)).unwrap().t().unwrap();
    let whole = (HashMap::from([("wide".to_owned(), wide)]), Tensors::new());
    saved(&folder.file(INDEX), 2, &whole);
    assert_loads(&folder.file(INDEX), 3, &whole);
    ShardedCheckpoint::open(folder.file(INDEX)).unwrap().merge(folder.file("whole.safetensors")).unwrap();
    assert_loads(&folder.file("whole.safetensors"), 3, &whole);
}

#[test]
fn an_index_of_another_program_loads() {
    let folder = Folder::new("foreign");
    let whole = whole(6, DType::F16);
    candle_core::safetensors::save(&whole.0, folder.file("model-00001-of-00002.safetensors")).unwrap();
    candle_core::safetensors::save(&whole.1, folder.file("model-00002-of-00002.safetensors")).unwrap();
    let place = |tensors: &Tensors, file| tensors.keys().map(|name| (name.clone(), file)).collect::<Vec<_>>();
    let mut map: HashMap<String, &str> = place(&whole.0, "model-00001-of-00002.safetensors").into_iter().collect();
    map.extend(place(&whole.1, "model-00002-of-00002.safetensors"));
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    let path = folder.file("model.safetensors.index.json");
    std::fs::write(&path, index.to_string()).unwrap();
    assert_loads(&path, 3, &whole);
    #[cfg(unix)]
    {
        // A cache of links, as Hugging Face's programs make.
        let cache = Folder::new("links");
        for name in folder.list() {
            std::os::unix::fs::symlink(folder.file(&name), cache.file(&name)).unwrap();
        }
        assert_loads(&cache.file("model.safetensors.index.json"), 2, &whole);
    }
    // Its files are not a save's to remove.
    for result in save(&path, 1, &whole) {
        assert!(message(result, "model.safetensors.index.json").contains("mos_head_save"));
    }
    assert_loads(&path, 2, &whole);
}

#[test]
fn values_are_converted_to_another_dtype_of_floats_alone() {
    let folder = Folder::new("dtypes");
    let ids = Tensor::arange(0u32, 6, &Device::Cpu).unwrap();
    let halves = tensor(&[6, 2], 1, DType::F16);
    let tensors = HashMap::from([("ids", ids.clone()), ("halves", halves.clone())]);
    let path = folder.file("some.safetensors");
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let checkpoint = ShardedCheckpoint::open(&path).unwrap();
    let rows = checkpoint.load_rows("halves", 2..5, DType::F64, &Device::Cpu).unwrap();
    assert_same(&rows, &halves.narrow(0, 2, 3).unwrap().to_dtype(DType::F64).unwrap());
    assert_same(&checkpoint.load_rows("ids", 1..3, DType::U32, &Device::Cpu).unwrap(), &ids.narrow(0, 1, 2).unwrap());
    let message = message(checkpoint.load("ids", DType::F32, &Device::Cpu), "some.safetensors");
    assert!(message.ends_with("expected ids in f32, got U32"), "{message}");
    std::fs::write(&path, file_of(r#"{"flags":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#, 2)).unwrap();
    let message = self::message(
        ShardedCheckpoint::open(&path).unwrap().load("flags", DType::U8, &Device::Cpu),
        "some.safetensors",
    );
    assert!(message.ends_with("expected flags in u8, got BOOL"), "{message}");
}

#[test]
fn what_a_checkpoint_does_not_hold_is_an_error() {
    let folder = Folder::new("asked");
    let whole = whole(7, DType::F32);
    saved(&folder.file(INDEX), 2, &whole);
    let checkpoint = ShardedCheckpoint::open(folder.file(INDEX)).unwrap();
    let load =
        |name: &str, rows: Range<usize>| message(checkpoint.load_rows(name, rows, DType::F32, &Device::Cpu), INDEX);
    assert!(load("decoder.weights", 0..1).ends_with("expected a tensor decoder.weights, got none"));
    assert!(load("decoder.weight", 3..12).ends_with("expected rows among the 11 of decoder.weight, got 3..12"));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 3..2;
    assert!(load("decoder.weight", backwards).ends_with("got 3..2"));
    assert!(load("scale", 0..1).ends_with("expected scale with rows, got a scalar"));
    let none = checkpoint.load_rows("decoder.weight", 4..4, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(none.dims(), [0, 3]);
    assert!(message(ShardedCheckpoint::open(folder.file("none.safetensors")), "none.safetensors").contains("read"));
    message(ShardedCheckpoint::open(&folder.0), "checkpoint-asked");
}

/// The bytes of a file with this header.
fn file_of(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; data]].concat()
}

#[test]
fn a_malformed_file_is_an_error() {
    let folder = Folder::new("malformed");
    let path = folder.file("bad.safetensors");
    let header = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        ShardedCheckpoint::open(&path)
    };
    let good = file_of(header, 24);
    open(&good).unwrap();
    (0..good.len()).for_each(|length| _ = message(open(&good[..length]), "bad.safetensors"));
    let longer = message(open(&file_of(header, 25)), "bad.safetensors");
    assert!(longer.ends_with("expected 24 bytes of tensors, as its header says, got 25 bytes"), "{longer}");
    let mut header_of_terabytes = good.clone();
    header_of_terabytes[5] = 1;
    assert!(message(open(&header_of_terabytes), "bad.safetensors").contains("a header of at most 81 bytes"));
    for wrong in [
        "[0,24]",
        "{",
        r#"{"a":{"dtype":"F31","shape":[2,3],"data_offsets":[0,24]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2,4],"data_offsets":[0,24]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[24,0]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[-1,23]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,24]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}"#,
        r#"{"a.rows.0-2-of-3":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
        r#"{"a.rows.1-3-of-3":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
        r#"{"a.rows.0-3-of-3":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
        r#"{"a.rows.2-0-of-2":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
    ] {
        message(open(&file_of(wrong, 24)), "bad.safetensors");
    }
}

#[test]
fn a_file_of_another_format_is_told_by_its_first_bytes() {
    let folder = Folder::new("formats");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4976698672\n";
    let legacy = [&[0x80, 2, 0x8a, 10][..], b"l\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."].concat();
    for (name, bytes, format) in [
        ("model.safetensors", &pointer[..], "a pointer of Git LFS"),
        ("pytorch_model.bin", b"PK\x03\x04 and more", "a pickle of PyTorch"),
        ("pytorch_model.pt", b"PK\x03\x04", "a pickle of PyTorch"),
        ("model.pkl", &legacy, "a pickle"),
        ("model.gguf", b"GGUF\x03\0\0\0\0\0\0\0", "a GGUF file"),
    ] {
        let path = folder.file(name);
        std::fs::write(&path, bytes).unwrap();
        let found = message(ShardedCheckpoint::open(&path), name);
        assert!(found.contains("expected a safetensors file, got") && found.contains(format), "{found}");
    }
    let index = folder.file(INDEX);
    std::fs::write(&index, pointer).unwrap();
    let found = message(ShardedCheckpoint::open(&index), INDEX);
    assert!(found.contains("an index of safetensors files, got a pointer of Git LFS"), "{found}");
    // A header of 640 bytes begins as a pickle does.
    let header = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    let padded = file_of(&format!("{header:640}"), 24);
    assert_eq!(padded[..2], [0x80, 2]);
    let path = folder.file("padded.safetensors");
    std::fs::write(&path, padded).unwrap();
    assert_eq!(ShardedCheckpoint::open(&path).unwrap().shape("a").unwrap(), [2, 3]);
}

#[test]
fn no_flipped_bit_of_a_header_panics() {
    let folder = Folder::new("flipped");
    let path = folder.file("flipped.safetensors");
    let header = concat!(
        r#"{"a.rows.0-2-of-3":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"#,
        r#""a.rows.2-3-of-3":{"dtype":"F32","shape":[1,1],"data_offsets":[8,12]},"#,
        r#""b":{"dtype":"U8","shape":[2,1],"data_offsets":[12,14]}}"#
    );
    let good = file_of(header, 14);
    let mut opened = 0;
    for bit in 0..8 * (good.len() - 14) {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, bytes).unwrap();
        let Ok(checkpoint) = ShardedCheckpoint::open(&path) else { continue };
        opened += 1;
        for name in checkpoint.names() {
            let _ = checkpoint.load(name, DType::F32, &Device::Cpu);
            let _ = checkpoint.load_rows(name, 0..1, DType::F32, &Device::Cpu);
        }
        let _ = checkpoint.merge(folder.file("merged.safetensors"));
    }
    assert!(opened > 0, "the others are errors");
}

#[test]
fn sizes_of_any_magnitude_beside_none_are_an_error() {
    let folder = Folder::new("strides");
    let path = folder.file("none.safetensors");
    let huge = usize::MAX / 2;
    let header = format!(r#"{{"a":{{"dtype":"F32","shape":[0,{huge},{huge}],"data_offsets":[0,0]}}}}"#);
    std::fs::write(&path, file_of(&header, 0)).unwrap();
    let checkpoint = ShardedCheckpoint::open(&path).unwrap();
    message(checkpoint.load("a", DType::F32, &Device::Cpu), "none.safetensors");
    message(checkpoint.load_rows("a", 0..0, DType::F32, &Device::Cpu), "none.safetensors");
    message(checkpoint.merge(folder.file("merged.safetensors")), "merged.safetensors");
}

/// Values of 4 bits, whose rows are not whole bytes.
#[test]
fn values_that_candle_does_not_compute_with_are_merged_alone() {
    let folder = Folder::new("four-bits");
    let path = folder.file("four.safetensors");
    let header = r#"{"a":{"dtype":"F4","shape":[2,5],"data_offsets":[0,5]}}"#;
    std::fs::write(&path, file_of(header, 5)).unwrap();
    let checkpoint = ShardedCheckpoint::open(&path).unwrap();
    for dtype in [DType::F32, DType::F4] {
        message(checkpoint.load("a", dtype, &Device::Cpu), "four.safetensors");
        message(checkpoint.load_rows("a", 0..1, dtype, &Device::Cpu), "four.safetensors");
    }
    checkpoint.merge(folder.file("merged.safetensors")).unwrap();
    let bytes = std::fs::read(folder.file("merged.safetensors")).unwrap();
    assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().tensor("a").unwrap().data(), [7; 5]);
}

/// A sparse file of 1 TiB, which no machine of these tests has room for.
#[test]
fn a_rank_reads_its_own_rows_alone() {
    if cfg!(not(target_os = "linux")) {
        return;
    }
    use std::io::{Seek, SeekFrom, Write};
    let folder = Folder::new("tebibyte");
    let path = folder.file("large.safetensors");
    let (rows, columns) = (1usize << 28, 1 << 10);
    let header = format!(
        r#"{{"decoder.weight":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{}]}}}}"#,
        4 * rows * columns
    );
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&file_of(&header, 0)).unwrap();
    let start = file.stream_position().unwrap();
    file.set_len(start + (4 * rows * columns) as u64).unwrap();
    let row = tensor(&[1, columns], 3, DType::F32);
    file.seek(SeekFrom::Start(start + (4 * (rows - 2) * columns) as u64)).unwrap();
    file.write_all(&bits(&row)).unwrap();
    let checkpoint = ShardedCheckpoint::open(&path).unwrap();
    let loaded = checkpoint.load_rows("decoder.weight", rows - 3..rows, DType::F32, &Device::Cpu).unwrap();
    let zeros = row.zeros_like().unwrap();
    assert_same(&loaded, &Tensor::cat(&[&zeros, &row, &zeros], 0).unwrap());
}

/// Each rank's head, from its rows of a whole checkpoint or of a save, has the loss of the whole head.
#[test]
fn a_head_of_loaded_rows_has_the_loss_of_the_whole() -> Result<()> {
    let folder = Folder::new("head");
    let shapes: [(&str, &[usize]); 5] = [
        ("prior.weight", &[2, 3]),
        ("latent.weight", &[6, 3]),
        ("latent.bias", &[6]),
        ("decoder.weight", &[VOCAB, 3]),
        ("decoder.bias", &[VOCAB]),
    ];
    let named = |(i, (name, shape)): (usize, (&str, &[usize]))| (name.to_owned(), tensor(shape, i, DType::F32));
    let tensors: Tensors = shapes.into_iter().enumerate().map(named).collect();
    let (plain, saved) = (folder.file("whole.safetensors"), folder.file(INDEX));
    candle_core::safetensors::save(&tensors, &plain)?;
    let (hidden, targets) = (tensor(&[5, 3], 9, DType::F32), Tensor::new(&[0u32, 10, 4, 7, 3], &Device::Cpu)?);
    let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
    let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(3, VOCAB, 2), vb)?;
    let expected = head.loss(&hidden, &targets, &LossOptions::new())?.value.to_scalar::<f32>()?;
    let losses = |ranks: Arc<dyn Collectives>| -> Result<()> {
        let shard = VocabShard::new(ranks, VOCAB)?;
        let (rows, replicated) = tensors.clone().into_iter().partition(|(name, _)| name.starts_with("decoder."));
        save_sharded(&shard, &saved, &rank_rows(&rows, &shard.range()), &replicated)?;
        for path in [&plain, &saved] {
            let checkpoint = ShardedCheckpoint::open(path)?;
            let vb = checkpoint.var_builder(&shard, DType::F32, &Device::Cpu);
            assert!(vb.contains_tensor("decoder.bias") && !vb.contains_tensor("decoder"));
            assert!(vb.get((shard.range().len(), 4), "decoder.weight").is_err());
            assert!(vb.get(1, "latent.bias").is_err());
            let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(3, shard.range().len(), 2), vb)?;
            let head = VocabParallel::new(head, shard.clone())?;
            let found = head.loss(&hidden, &targets, &LossOptions::new())?.value.to_scalar::<f32>()?;
            assert_abs_diff_eq!(found, expected, epsilon = 1e-5);
        }
        Ok(())
    };
    (1..=4).flat_map(|ranks| on_ranks(ranks, losses)).collect()
}

#[test]
fn a_malformed_index_is_an_error() {
    let folder = Folder::new("index");
    let path = folder.file(INDEX);
    saved(&path, 2, &whole(8, DType::F32));
    let good = std::fs::read_to_string(&path).unwrap();
    let open = |from: &str, to: &str| {
        assert!(good.contains(from));
        std::fs::write(&path, good.replace(from, to)).unwrap();
        ShardedCheckpoint::open(&path)
    };
    open("{", "{").unwrap();
    let name = |result: Result<ShardedCheckpoint>, file: &str, text: &str| {
        let message = message(result, file);
        assert!(message.contains(text), "{message}");
    };
    name(open("{", "["), INDEX, "an index of safetensors files");
    name(open("weight_map", "weights"), INDEX, "a weight_map");
    name(open("head.1-00002-of-00002", "head.2-00002-of-00002"), "head.2-00002-of-00002.safetensors", "can be read");
    name(open("\"head.1-00002-of-00002", "\"../head.1-00002-of-00002"), INDEX, "a file in its folder");
    name(open("\"head.1-00002-of-00002", "\"/head.1-00002-of-00002"), INDEX, "a file in its folder");
    name(open("\"head.1-00002-of-00002.safetensors\"", "3"), INDEX, "a file in its folder");
    name(open("\"scale\"", "\"scales\""), "head.1-00001-of-00002.safetensors", "a tensor scales, got none");
    name(
        open("\"decoder.bias.rows.5-11-of-11\": \"head.1-00002-of-00002.safetensors\",", ""),
        INDEX,
        "11 rows of decoder.bias, got the first 5",
    );
    name(
        open("\"decoder.bias.rows.0-5-of-11\": \"head.1-00001-of-00002.safetensors\",", ""),
        "head.1-00002",
        "decoder.bias from row 0 of 11",
    );
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    message(ShardedCheckpoint::open(&path), INDEX);
}

#[test]
fn rows_that_do_not_fit_together_are_an_error() {
    let folder = Folder::new("unfit");
    let path = folder.file("rows.safetensors");
    let open = |pieces: &[(&str, &[usize], DType)]| {
        let tensors: HashMap<&str, Tensor> =
            pieces.iter().map(|&(name, shape, dtype)| (name, tensor(shape, 1, dtype))).collect();
        candle_core::safetensors::save(&tensors, &path).unwrap();
        ShardedCheckpoint::open(&path)
    };
    let first: (&str, &[usize], DType) = ("a.rows.0-2-of-4", &[2, 3], DType::F32);
    open(&[first, ("a.rows.2-4-of-4", &[2, 3], DType::F32)]).unwrap();
    let others: [(&str, &[usize], DType); 7] = [
        ("a.rows.1-4-of-4", &[3, 3], DType::F32),
        ("a.rows.3-4-of-4", &[1, 3], DType::F32),
        ("a.rows.2-5-of-5", &[3, 3], DType::F32),
        ("a.rows.2-4-of-4", &[1, 3], DType::F32),
        ("a.rows.2-4-of-4", &[2, 2], DType::F32),
        ("a.rows.2-4-of-4", &[2, 3], DType::F16),
        ("a", &[4, 3], DType::F32),
    ];
    others.into_iter().for_each(|other| _ = message(open(&[first, other]), "rows.safetensors"));
    // A tensor whose name is spelled otherwise is a whole one.
    assert_eq!(open(&[("a.rows.00-2-of-2", &[2, 3], DType::F32)]).unwrap().names().next(), Some("a.rows.00-2-of-2"));
    // So is a scalar, which has no rows.
    let scalars: [(&str, &[usize], DType); 2] =
        [("a.rows.0-1-of-2", &[], DType::F32), ("a.rows.1-2-of-2", &[], DType::F32)];
    let checkpoint = open(&scalars).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.rows.0-1-of-2", "a.rows.1-2-of-2"]);
    assert_same(&checkpoint.load("a.rows.1-2-of-2", DType::F32, &Device::Cpu).unwrap(), &tensor(&[], 1, DType::F32));
}

/// Checks that a save fails on every rank, on some with an error of their own, and that the save before loads.
fn assert_fails(folder: &Folder, results: Vec<Result<()>>, own: &[usize], before: &(Tensors, Tensors)) {
    for (rank, result) in results.into_iter().enumerate() {
        match (result, own.contains(&rank)) {
            (Err(Error::Checkpoint { .. }), true) | (Err(Error::Ranks { .. }), false) => {}
            (result, _) => panic!("rank {rank}: {result:?}"),
        }
    }
    assert_loads(&folder.file(INDEX), 2, before);
    assert!(!folder.list().iter().any(|name| name.ends_with("safetensors.partial")), "{:?}", folder.list());
}

#[test]
fn a_rank_that_cannot_write_fails_the_save_of_all() {
    let folder = Folder::new("unwritable");
    let (before, after) = (whole(9, DType::F32), whole(10, DType::F32));
    saved(&folder.file(INDEX), 3, &before);
    let files = folder.list();
    for blocked in ["head.2-00002-of-00003.safetensors.partial", "head.2-00002-of-00003.safetensors"] {
        std::fs::create_dir_all(folder.file(blocked).join("in-the-way")).unwrap();
        let results = save(&folder.file(INDEX), 3, &after);
        std::fs::remove_dir_all(folder.file(blocked)).unwrap();
        assert_fails(&folder, results, &[1], &before);
        assert_eq!(folder.list(), files, "the others' files are removed");
    }
    if cfg!(target_os = "linux") {
        // A disk that is full.
        #[cfg(unix)]
        std::os::unix::fs::symlink("/dev/full", folder.file("head.2-00003-of-00003.safetensors.partial")).unwrap();
        assert_fails(&folder, save(&folder.file(INDEX), 3, &after), &[2], &before);
        assert_eq!(folder.list(), files, "no file is left");
    }
    // The index cannot be written.
    let blocked = folder.file(&format!("{INDEX}.partial"));
    std::fs::create_dir(&blocked).unwrap();
    assert_fails(&folder, save(&folder.file(INDEX), 3, &after), &[0], &before);
    std::fs::remove_dir(&blocked).unwrap();
    saved(&folder.file(INDEX), 2, &after);
    assert_loads(&folder.file(INDEX), 3, &after);
}

#[test]
fn a_folder_that_is_missing_is_an_error_on_every_rank() {
    let folder = Folder::new("missing");
    for result in save(&folder.file("nowhere").join(INDEX), 2, &whole(9, DType::F32)) {
        message(result, "head.1-");
    }
    assert!(folder.list().is_empty());
}

#[test]
fn a_rank_that_saves_other_tensors_fails_the_save_of_all() {
    let folder = Folder::new("others");
    let (before, after) = (whole(11, DType::F32), whole(12, DType::F32));
    saved(&folder.file(INDEX), 2, &before);
    let fails = |own: &[usize], change: &(dyn Fn(&mut Tensors, &mut Tensors) + Sync)| {
        let results = save_changed(&folder.file(INDEX), 2, &after, |rank, rows, replicated| {
            if rank == 1 {
                change(rows, replicated);
            }
        });
        assert_fails(&folder, results, own, &before);
    };
    let insert = |tensors: &mut Tensors, name: &str, shape: &[usize]| {
        tensors.insert(name.into(), tensor(shape, 1, DType::F32));
    };
    fails(&[1], &|rows, _| insert(rows, "decoder.weight", &[2, 3]));
    fails(&[1], &|rows, _| insert(rows, "decoder.weight", &[]));
    fails(&[1], &|_, replicated| insert(replicated, "decoder.weight", &[6, 3]));
    fails(&[1], &|_, replicated| insert(replicated, "a.rows.0-2-of-2", &[2]));
    fails(&[1], &|_, replicated| insert(replicated, "__metadata__", &[2]));
    fails(&[], &|rows, _| insert(rows, "decoder.weight", &[6, 4]));
    fails(&[], &|rows, _| _ = rows.remove("decoder.bias"));
    fails(&[], &|_, replicated| insert(replicated, "prior.weight", &[2, 4]));
    // As many tensors: the first that differs is named.
    for result in save_changed(&folder.file(INDEX), 2, &after, |rank, rows, _| {
        if rank == 1 {
            insert(rows, "decoder.weight", &[6, 4]);
        }
    }) {
        let message = result.unwrap_err().to_string();
        assert!(
            message.starts_with("names, dtypes and columns of the tensors, first at decoder.weight: "),
            "{message}"
        );
    }
    for result in save(&folder.file("head.safetensors"), 2, &after) {
        assert!(message(result, "head.safetensors").contains(".safetensors.index.json"));
    }
}

#[test]
fn a_save_takes_the_place_of_one_that_was_interrupted() {
    let folder = Folder::new("interrupted");
    let (before, after) = (whole(13, DType::F32), whole(14, DType::F32));
    saved(&folder.file(INDEX), 2, &before);
    // One rank had renamed its file, the others had not; nor had files of an earlier save been removed.
    for left in [
        "head.2-00001-of-00002.safetensors",
        "head.2-00002-of-00002.safetensors.partial",
        "head.2-00003-of-00003.safetensors",
        "head.2-00003-of-00003.safetensors.partial",
        "head.0-00001-of-00002.safetensors",
    ] {
        std::fs::write(folder.file(left), "half").unwrap();
    }
    // Files of another program.
    let others = [
        "head-00001-of-00002.safetensors",
        "head.1-0001-of-00002.safetensors",
        "head.1-00000-of-00002.safetensors",
        "head.1-00001-of-00002.safetensors.json",
        "head.best-00001-of-00002.safetensors",
        "tail.1-00001-of-00002.safetensors",
    ];
    others.iter().for_each(|other| std::fs::write(folder.file(other), "whole").unwrap());
    assert_loads(&folder.file(INDEX), 3, &before);
    saved(&folder.file(INDEX), 2, &after);
    assert_loads(&folder.file(INDEX), 3, &after);
    let mut expected = others.to_vec();
    expected.extend(["head.2-00001-of-00002.safetensors", "head.2-00002-of-00002.safetensors", INDEX]);
    expected.sort_unstable();
    assert_eq!(folder.list(), expected);
}

#[test]
fn a_checkpoint_that_is_open_reads_on_while_it_is_replaced() {
    if cfg!(not(unix)) {
        return;
    }
    let folder = Folder::new("open");
    let (before, after) = (whole(15, DType::F32), whole(16, DType::F32));
    saved(&folder.file(INDEX), 2, &before);
    let open = ShardedCheckpoint::open(folder.file(INDEX)).unwrap();
    saved(&folder.file(INDEX), 2, &after);
    assert_same(&open.load("decoder.weight", DType::F32, &Device::Cpu).unwrap(), &before.0["decoder.weight"]);
}
