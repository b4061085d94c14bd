//! CIDEr-D (Vedantam et al., 2015) of captions with several references each, on whitespace tokens.

use std::collections::{HashMap, HashSet};

const ORDERS: usize = 4;
/// The width of the penalty of a difference in length.
const SIGMA: f64 = 6.0;

/// The numbers of each n-gram, for every n.
type Counts<'a> = [HashMap<Vec<&'a str>, f64>; ORDERS];

/// The n-grams of a text, weighted by how rare they are, with the norms of the weights.
struct Vector<'a> {
    weights: Counts<'a>,
    norms: [f64; ORDERS],
    /// The number of bigrams, as the evaluation of COCO counts.
    length: f64,
}

/// Returns the mean CIDEr-D of captions, each with its references; usually from 0 to about 10, COCO's tables have it
/// times 100. The rarity of an n-gram is that in the references given.
pub fn cider_d(captions: &[(&str, Vec<&str>)]) -> f64 {
    let references: Vec<Vec<Counts>> =
        captions.iter().map(|(_, references)| references.iter().map(|text| counts(text)).collect()).collect();
    let mut frequencies = HashMap::<&[&str], f64>::new();
    for image in &references {
        let grams: HashSet<&[&str]> = image.iter().flatten().flat_map(HashMap::keys).map(Vec::as_slice).collect();
        grams.into_iter().for_each(|gram| *frequencies.entry(gram).or_default() += 1.0);
    }
    let images = (captions.len() as f64).ln();
    let rarity = |gram: &[&str]| images - frequencies.get(gram).map_or(0.0, |frequency| frequency.ln());
    let scores = captions.iter().zip(&references).map(|((caption, _), references)| {
        let caption = vector(&counts(caption), &rarity);
        let each = references.iter().map(|reference| similarity(&caption, &vector(reference, &rarity)));
        10.0 * each.sum::<f64>() / references.len().max(1) as f64
    });
    scores.sum::<f64>() / captions.len().max(1) as f64
}

fn counts(text: &str) -> Counts<'_> {
    let words: Vec<&str> = text.split_whitespace().collect();
    std::array::from_fn(|i| {
        let mut counts = HashMap::new();
        words.windows(i + 1).for_each(|gram| *counts.entry(gram.to_vec()).or_default() += 1.0);
        counts
    })
}

fn vector<'a>(counts: &Counts<'a>, rarity: &impl Fn(&[&str]) -> f64) -> Vector<'a> {
    let length = counts[1].values().sum();
    let weights = counts.clone().map(|mut counts| {
        counts.iter_mut().for_each(|(gram, count)| *count *= rarity(gram));
        counts
    });
    let norms = weights.each_ref().map(|weights| weights.values().map(|weight| weight * weight).sum::<f64>().sqrt());
    Vector { weights, norms, length }
}

/// Returns the mean over n of the cosines, where a caption's n-gram weighs no more than the reference's, with the
/// penalty.
fn similarity(caption: &Vector, reference: &Vector) -> f64 {
    let cosine = |i: usize| {
        let reference_weight = |gram: &Vec<&str>| reference.weights[i].get(gram).copied().unwrap_or(0.0);
        let weights = caption.weights[i].iter().map(|(gram, &weight)| (weight, reference_weight(gram)));
        let product: f64 = weights.map(|(weight, other)| weight.min(other) * other).sum();
        match caption.norms[i] * reference.norms[i] {
            0.0 => product,
            norms => product / norms,
        }
    };
    let difference = caption.length - reference.length;
    let penalty = (-difference * difference / (2.0 * SIGMA * SIGMA)).exp();
    penalty * (0..ORDERS).map(cosine).sum::<f64>() / ORDERS as f64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::Value;

    pub(crate) fn golden() -> Value {
        serde_json::from_str(include_str!("golden/texts.json")).unwrap()
    }

    pub(crate) fn captions<'a>(golden: &'a Value, count: usize) -> Vec<(&'a str, Vec<&'a str>)> {
        let all = golden["captions"].as_array().unwrap()[..count].iter();
        let references =
            |one: &'a Value| one["references"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        all.map(|one| (one["caption"].as_str().unwrap(), references(one))).collect()
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found}, expected {expected}");
    }

    /// The values of pycocoevalcap 1.2, for dictionaries of lists by image: `Cider().compute_score(references,
    /// captions)`.
    #[test]
    fn cider_d_equals_that_of_coco() {
        for (count, expected) in [(4, 1.878851992634841), (3, 2.445124609346929), (2, 3.13442316996706)] {
            close(cider_d(&captions(&golden(), count)), expected);
        }
    }
}
