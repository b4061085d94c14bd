//! Hands a rank's tensors of a checkpoint to candle's constructors of layers.

use std::ops::Range;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::load::ShardedCheckpoint;
use crate::backend::shard::VocabShard;

impl ShardedCheckpoint {
    /// Returns a builder for a rank's layers. If a layer asks for a tensor with as many rows as the shard has, and the
    /// tensor is stored with one row for each id of the vocabulary, the layer gets the shard's rows, and no other bytes
    /// are read. It gets any other tensor whole.
    ///
    /// # Examples
    ///
    /// It also fills the variables of a training run that is resumed:
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use mos_head::distributed::{Collectives, ShardedCheckpoint, VocabParallel, VocabShard};
    /// # use mos_head::{MixtureConfig, MixtureOfSoftmaxes};
    /// fn resume(ranks: Arc<dyn Collectives>, vars: &VarMap) -> mos_head::Result<VocabParallel<MixtureOfSoftmaxes>> {
    ///     let shard = VocabShard::new(ranks, 128_256)?;
    ///     let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    ///     let head = MixtureOfSoftmaxes::new(&MixtureConfig::new(1024, shard.range().len(), 4), vb)?;
    ///
    ///     let checkpoint = ShardedCheckpoint::open("head.safetensors.index.json")?;
    ///     let saved = checkpoint.var_builder(&shard, DType::F32, &Device::Cpu);
    ///     for (name, var) in vars.data().lock().expect("the variables").iter() {
    ///         var.set(&saved.get(var.shape(), name)?)?;
    ///     }
    ///     VocabParallel::new(head, shard)
    /// }
    /// ```
    pub fn var_builder(&self, shard: &VocabShard, dtype: DType, device: &Device) -> VarBuilder<'_> {
        let view = ShardView { checkpoint: self, rows: shard.range(), vocab_size: shard.vocab_size() };
        VarBuilder::from_backend(Box::new(view), dtype, device.clone())
    }
}

/// A checkpoint as the rank of a shard sees it.
struct ShardView<'a> {
    checkpoint: &'a ShardedCheckpoint,
    rows: Range<usize>,
    vocab_size: usize,
}

impl SimpleBackend for ShardView<'_> {
    fn get(&self, expected: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let whole = self.checkpoint.shape(name)?;
        let tensor = match (whole, expected.dims()) {
            (whole, requested) if whole == requested => self.checkpoint.load(name, dtype, device),
            ([all, columns @ ..], [rows, requested @ ..])
                if (*all, *rows) == (self.vocab_size, self.rows.len()) && columns == requested =>
            {
                self.checkpoint.load_rows(name, self.rows.clone(), dtype, device)
            }
            _ => {
                let msg = format!("shape mismatch for {name}");
                return Err(candle_core::Error::UnexpectedShape { msg, expected, got: whole.into() });
            }
        };
        Ok(tensor?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        Ok(self.checkpoint.load(name, dtype, device)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.shape(name).is_ok()
    }
}
