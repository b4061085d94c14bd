//! Images with their captions: drawn from a seed, or features and captions from files.

use crate::scene::{Scene, SIDE};
use crate::{grammar, phrase::Phrase};
use candle_core::{DType, Device, Tensor};
use lab::data::{words::Words, Data, Digest};
use lab::Result;
use rand::{rngs::StdRng, SeedableRng};

/// The number of references of each drawn image.
pub(crate) const REFERENCES: usize = 5;
/// The number of drawn images for validation, and for the test.
const HELD_OUT: usize = 200;
/// One in this many held-out images shows a shape in a colour that no image for training has.
const NEW: usize = 4;

/// An image, by its row in the tensor of images, with its captions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Example {
    pub(crate) image: usize,
    pub(crate) captions: Vec<String>,
}

/// An image and the token ids of one of its captions, without start and end.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) image: usize,
    pub(crate) caption: Vec<u32>,
}

pub(crate) struct Dataset {
    pub(crate) name: String,
    /// Pictures, u8 `[images, height, width, 3]`, or features, f32 `[images, positions, width]`.
    pub(crate) images: Tensor,
    pub(crate) train: Vec<Example>,
    /// The part on which the epoch is chosen.
    pub(crate) valid: Vec<Example>,
    /// The part that is only scored, once training is over. It may be empty.
    pub(crate) test: Vec<Example>,
    /// The scene of each image, if they are drawn.
    pub(crate) scenes: Option<Vec<Scene>>,
}

impl Dataset {
    /// Draws `train` images to train on, and some for validation and the test, each with five captions.
    pub(crate) fn drawn(train: usize, seed: u64, device: &Device) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut pixels, mut scenes, mut examples) = (vec![], vec![], vec![]);
        for image in 0..train + 2 * HELD_OUT {
            let scene = Scene::draw(image >= train && image % NEW == 0, &mut rng);
            pixels.extend(scene.picture(&mut rng));
            let phrase = grammar::captions(&scene);
            let captions = (0..REFERENCES).map(|_| phrase.write(&mut rng)).collect();
            examples.push(Example { image, captions });
            scenes.push(scene);
        }
        let images = Tensor::from_vec(pixels, (examples.len(), SIDE, SIDE, 3), device)?;
        let test = examples.split_off(train + HELD_OUT);
        let valid = examples.split_off(train);
        Ok(Self { name: "drawn images".into(), images, train: examples, valid, test, scenes: Some(scenes) })
    }

    /// Returns the examples that a trained model is scored on, with the name of their part: those of the test if there
    /// are any, otherwise those of validation.
    pub(crate) fn scored(&self) -> (&'static str, &[Example]) {
        if self.test.is_empty() {
            ("valid", &self.valid)
        } else {
            ("test", &self.test)
        }
    }

    /// Returns all that can be said of an image, if it is drawn.
    pub(crate) fn grammar(&self, image: usize) -> Option<Phrase> {
        self.scenes.as_ref().map(|scenes| grammar::captions(&scenes[image]))
    }

    /// Returns the mean information of the captions, per word and end of a caption, in nats: no model of the images has
    /// a lower NLL on average. `None` if the images are not drawn.
    pub(crate) fn floor(&self, examples: &[Example]) -> Option<f64> {
        let (mut nats, mut words) = (0.0, 0);
        for Example { image, captions } in examples {
            let grammar = self.grammar(*image)?;
            for caption in captions {
                nats -= grammar.probability(caption).ln();
                words += caption.split_whitespace().count() + 1;
            }
        }
        Some(nats / words as f64)
    }

    /// Returns a pair for each caption of training and validation. The digest covers the captions and the means of the
    /// images.
    pub(crate) fn encode(&self, words: &Words) -> Result<Data<Pair>> {
        let examples = || self.train.iter().chain(&self.valid);
        let dims: Vec<usize> = (1..self.images.rank()).collect();
        let means = self.images.to_dtype(DType::F32)?.mean(dims)?.to_vec1::<f32>()?;
        let means: Vec<u32> = examples().map(|example| means[example.image].to_bits()).collect();
        let digest = Digest::default().texts(examples().flat_map(|example| &example.captions)).ids(&means).to_string();
        let (train, valid) = (pairs(&self.train, words), pairs(&self.valid, words));
        Ok(Data { name: self.name.clone(), digest, train, valid, per_word: [1.0; 2] })
    }
}

/// Returns a pair for each caption.
pub(crate) fn pairs(examples: &[Example], words: &Words) -> Vec<Pair> {
    let example_pairs = |example: &Example| {
        let pair = |text: &String| Pair { image: example.image, caption: words.encode(text) };
        example.captions.iter().map(pair).collect::<Vec<_>>()
    };
    examples.iter().flat_map(example_pairs).collect()
}

/// Returns the number of targets of a model, with the end of each caption.
pub(crate) fn targets(pairs: &[Pair]) -> usize {
    pairs.iter().map(|pair| pair.caption.len() + 1).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_drawn_images() {
        let drawn = |seed| Dataset::drawn(50, seed, &Device::Cpu).unwrap();
        let (one, again, other) = (drawn(1), drawn(1), drawn(2));
        assert_eq!((&one.train, &one.valid, &one.test), (&again.train, &again.valid, &again.test));
        let words = Words::from_texts(["a red circle"].into_iter(), 1, &[]);
        let digest = |dataset: &Dataset| dataset.encode(&words).unwrap().digest;
        assert_eq!(digest(&one), digest(&again));
        assert_ne!(digest(&one), digest(&other));
        let is_new = |example: &Example| one.scenes.as_ref().unwrap()[example.image].is_new();
        assert_eq!(
            [&one.train, &one.valid, &one.test].map(|part| part.iter().filter(|x| is_new(x)).count()),
            [0, 50, 50]
        );
    }

    #[test]
    fn every_caption_is_one_of_its_scene_and_of_few_others() {
        let dataset = Dataset::drawn(100, 1, &Device::Cpu).unwrap();
        let mut others = 0;
        for example in &dataset.train {
            let (own, other) = (dataset.grammar(example.image), dataset.grammar(example.image / 2 + 120));
            for caption in &example.captions {
                assert!(own.as_ref().unwrap().probability(caption) > 0.0, "{caption}");
                others += usize::from(other.as_ref().unwrap().probability(caption) > 0.0);
            }
        }
        assert!(others < 5, "{others}");
        let floor = dataset.floor(&dataset.valid).unwrap();
        assert!((0.5..1.5).contains(&floor), "{floor}");
    }
}
