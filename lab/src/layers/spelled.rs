//! Embeddings of the inputs: a table, or a convolutional network from the spelling of each word, which `--output
//! char-cnn` has for the rows of the decoder.

use crate::Result;
use candle_core::{Module, Tensor};
use candle_nn::Embedding;
use clap::ValueEnum;
use mos_head::parts::{CharCnn, CharCnnConfig};

/// The sizes of a network from spellings to rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CnnSize {
    /// The library's: 480 channels of widths 1 to 5
    #[default]
    Small,
    /// 4096 channels of widths 1 to 8 (Jozefowicz et al., 2016)
    Limits,
}

impl CnnSize {
    /// Returns the network of these sizes for rows of this width.
    pub fn config(self, width: usize, correction: usize) -> CharCnnConfig {
        let config = CharCnnConfig::new(width).with_correction(correction);
        match self {
            CnnSize::Small => config,
            CnnSize::Limits => {
                let filters = [(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024), (8, 2048)];
                config.with_filters(&filters)
            }
        }
    }

    /// Returns the number of parameters of the network for rows `[vocab, width]`, whose spellings have this many
    /// different characters.
    pub fn parameters(self, width: usize, correction: usize, vocab: usize, characters: usize) -> usize {
        let CharCnnConfig { embedding, filters, highway, .. } = self.config(width, correction);
        let channels: usize = filters.iter().map(|(_, channels)| channels).sum();
        let convolutions: usize = filters.iter().map(|(width, channels)| channels * (width * embedding + 1)).sum();
        let layers = highway * 2 * channels * (channels + 1) + width * (channels + 1);
        characters * embedding + convolutions + layers + correction * (vocab + width)
    }
}

/// What turns token ids into the inputs of the first layer.
pub(crate) enum Inputs {
    /// A row of a table for each id.
    Table(Embedding),
    /// Rows from spellings, computed in each call for the ids that occur.
    Spelled(CharCnn),
}

impl Inputs {
    /// Computes the inputs `[batch, steps, width]` of token ids `[batch, steps]`.
    pub(crate) fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let cnn = match self {
            Inputs::Table(embedding) => return Ok(embedding.forward(ids)?),
            Inputs::Spelled(cnn) => cnn,
        };
        let all = ids.flatten_all()?.to_vec1::<u32>()?;
        let mut different = all.clone();
        different.sort_unstable();
        different.dedup();
        let places = all.iter().map(|id| different.partition_point(|other| other < id) as u32);
        let places = Tensor::from_iter(places, ids.device())?;
        let rows = cnn.rows_of(&Tensor::new(different, ids.device())?)?;
        Ok(rows.index_select(&places, 0)?.reshape((ids.dim(0)?, ids.dim(1)?, cnn.context_dim()))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use candle_nn::{VarBuilder, VarMap};

    #[test]
    fn inputs_are_the_rows_of_their_spellings_and_train() {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let words = ["a", "on", "one", "two", "a"];
        let inputs = Inputs::Spelled(CharCnn::new(&CnnSize::Small.config(6, 0), &words, vb).expect("valid sizes"));
        let ids = Tensor::new(&[[3u32, 0, 3], [1, 4, 2]], &Device::Cpu).unwrap();
        let found = inputs.forward(&ids).unwrap();
        assert_eq!(found.dims(), [2, 3, 6]);
        let found = found.to_vec3::<f32>().unwrap();
        assert_eq!(found[0][0], found[0][2]);
        // Words that are spelled alike have the same input.
        assert_eq!(found[0][1], found[1][1]);
        assert_ne!(found[0][0], found[1][0]);
        let gradients = inputs.forward(&ids).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
    }

    #[test]
    fn parameters_are_counted_without_making_them() {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let words = ["ab", "bc", "abc"];
        CharCnn::new(&CnnSize::Small.config(6, 4), &words, vb).expect("valid sizes");
        let made: usize = varmap.all_vars().iter().map(|var| var.elem_count()).sum();
        let rows = varmap.data().lock().unwrap()["embedding.weight"].dims()[0];
        assert_eq!(CnnSize::Small.parameters(6, 4, 3, rows), made);
    }
}
