//! Tensors to save and load, and a checkpoint that ranks save with one cut and load with another.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use mos_head::distributed::{save_sharded, Collectives, ShardedCheckpoint, VocabShard};
use mos_head::Result;

pub const VOCAB: usize = 11;
pub const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
pub const INDEX: &str = "head.safetensors.index.json";

pub type Tensors = HashMap<String, Tensor>;

/// A folder that disappears after the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        let path = Self::path(test, std::process::id());
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn path(test: &str, process: u32) -> PathBuf {
        std::env::temp_dir().join(format!("mos-head-checkpoint-{test}-{process}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Values that differ for each seed.
pub fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    crate::values::tensor(shape, seed, dtype).unwrap()
}

/// Tensors with one row for each token id, and others.
pub fn whole(seed: usize, dtype: DType) -> (Tensors, Tensors) {
    let named = |name: &str, shape: &[usize]| (name.to_owned(), tensor(shape, seed + name.len(), dtype));
    let rows = [named("decoder.weight", &[VOCAB, 3]), named("decoder.bias", &[VOCAB]), named("cube", &[VOCAB, 2, 2])];
    let replicated = [named("prior.weight", &[2, 3]), named("scale", &[])];
    (rows.into(), replicated.into())
}

pub fn rank_rows(tensors: &Tensors, rows: &Range<usize>) -> Tensors {
    let own = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len()).unwrap();
    tensors.iter().map(|(name, tensor)| (name.clone(), own(tensor))).collect()
}

pub fn bits(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::new();
    tensor.write_bytes(&mut bytes).unwrap();
    bytes
}

pub fn assert_same(tensor: &Tensor, expected: &Tensor) {
    assert_eq!((tensor.dims(), tensor.dtype()), (expected.dims(), expected.dtype()));
    assert_eq!(bits(tensor), bits(expected));
}

/// Checks what a rank loads.
pub fn assert_rank_loads(shard: &VocabShard, path: &Path, (rows, replicated): &(Tensors, Tensors)) -> Result<()> {
    let checkpoint = ShardedCheckpoint::open(path)?;
    assert_eq!(checkpoint.names().count(), rows.len() + replicated.len());
    for (name, expected) in rank_rows(rows, &shard.range()) {
        assert_same(&checkpoint.load_rows(&name, shard.range(), expected.dtype(), &Device::Cpu)?, &expected);
        let vb = checkpoint.var_builder(shard, expected.dtype(), &Device::Cpu);
        assert_same(&vb.get(expected.shape(), &name)?, &expected);
    }
    for (name, expected) in rows.iter().chain(replicated) {
        assert_eq!(checkpoint.shape(name)?, expected.dims());
        assert_same(&checkpoint.load(name, expected.dtype(), &Device::Cpu)?, expected);
        let vb = checkpoint.var_builder(shard, expected.dtype(), &Device::Cpu);
        assert_same(&vb.get(expected.shape(), name)?, expected);
    }
    Ok(())
}

/// The ranks save tensors with one cut and load them with another, from the save and merged.
pub fn loads_with_another_cut(ranks: &Arc<dyn Collectives>) -> Result<()> {
    let (rank, count) = (ranks.rank(), ranks.ranks());
    let first_folder = (rank == 0).then(|| Folder::new("cut"));
    let process = ranks.all_gather(&[f64::from(std::process::id())])?[0] as u32;
    let (index, merged) =
        (Folder::path("cut", process).join(INDEX), Folder::path("cut", process).join("whole.safetensors"));
    let even = VocabShard::new(ranks.clone(), VOCAB)?;
    // The first ranks have one row each.
    let own = if rank + 1 < count { 1 } else { VOCAB + 1 - count };
    let uneven = VocabShard::with_rows(ranks.clone(), own)?;
    for (seed, dtype) in DTYPES.into_iter().enumerate() {
        let whole = whole(seed, dtype);
        for (saved, loaded) in [(&even, &uneven), (&uneven, &even)] {
            save_sharded(saved, &index, &rank_rows(&whole.0, &saved.range()), &whole.1)?;
            assert_rank_loads(loaded, &index, &whole)?;
            if rank == 0 {
                ShardedCheckpoint::open(&index)?.merge(&merged)?;
            }
            // The others wait for the file, and the first for its readers.
            ranks.all_gather(&[0.0])?;
            assert_rank_loads(loaded, &merged, &whole)?;
            ranks.all_gather(&[0.0])?;
        }
    }
    drop(first_folder);
    Ok(())
}
