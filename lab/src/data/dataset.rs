//! What a model is trained on and what it is evaluated on.

use super::digest::Digest;

/// A corpus as a model reads it.
#[derive(Clone, Debug)]
pub struct Data<T> {
    /// The name of the data in reports.
    pub name: String,
    /// The digest of the vocabulary and both parts, to recognize the corpus of a checkpoint.
    pub digest: String,
    /// The items to train on.
    pub train: Vec<T>,
    /// The items that are evaluated after each epoch.
    pub valid: Vec<T>,
    /// The mean number of the model's targets per word of `train` and of `valid`. NLLs are shown per word.
    pub per_word: [f64; 2],
}

impl Data<u32> {
    /// Returns texts whose first token is an input only; all others are targets.
    pub fn new<S: AsRef<str>>(
        name: String,
        vocabulary: impl IntoIterator<Item = S>,
        train: Vec<u32>,
        valid: Vec<u32>,
    ) -> Self {
        let digest = Digest::default().texts(vocabulary).ids(&train).ids(&valid).to_string();
        Self { name, digest, train, valid, per_word: [1.0; 2] }
    }
}
