//! Features of images and their captions from files.

use crate::data::{Dataset, Example};
use candle_core::{DType, Device, Tensor};
use lab::Result;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// The parts, by the names of the splits.
const SPLITS: [&str; 3] = ["train", "valid", "test"];

/// Reads the tensors `features` `[images, positions, width]` and `ids` `[images]`, and a caption per line, an object
/// with `image_id`, `caption` and `split`. Every image with captions is in one part; images without a caption are left
/// out.
pub(crate) fn dataset(features: &Path, captions: &Path, device: &Device) -> Result<Dataset> {
    let (images, ids) =
        read_features(features, device).map_err(|error| format!("--features {}: {error}", features.display()))?;
    let rows: HashMap<i64, usize> = ids.into_iter().zip(0..).collect();
    if rows.len() != images.dim(0)? {
        return Err(format!("--features {}: some of the ids occur twice", features.display()).into());
    }
    let text = std::fs::read_to_string(captions)
        .map_err(|error| format!("--captions {} cannot be read: {error}", captions.display()))?;
    // The part and the index in it of each image that has a caption.
    let mut places = HashMap::<usize, (usize, usize)>::new();
    let mut parts: [Vec<Example>; 3] = Default::default();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let at =
            |error: Box<dyn std::error::Error>| format!("--captions {} line {}: {error}", captions.display(), i + 1);
        let (id, caption, part) = parse(line).map_err(at)?;
        let row = *rows.get(&id).ok_or_else(|| at(format!("the features have no image_id {id}").into()))?;
        let next = parts[part].len();
        let (other, index) = *places.entry(row).or_insert((part, next));
        if other != part {
            let (here, before) = (SPLITS[part], SPLITS[other]);
            return Err(at(format!("image_id {id} is in the split {here}, but before in {before}").into()).into());
        }
        if index == next {
            parts[part].push(Example { image: row, captions: vec![] });
        }
        parts[part][index].captions.push(caption);
    }
    for (name, part) in SPLITS.iter().zip(&parts).take(2) {
        if part.is_empty() {
            return Err(format!("--captions {}: no line has the split {name:?}", captions.display()).into());
        }
    }
    let [train, valid, test] = parts;
    Ok(Dataset { name: captions.display().to_string(), images, train, valid, test, scenes: None })
}

fn read_features(path: &Path, device: &Device) -> Result<(Tensor, Vec<i64>)> {
    let tensors = candle_core::safetensors::load(path, device)?;
    let get = |name: &str, shape: &str, rank: usize| -> Result<&Tensor> {
        let tensor = tensors.get(name).ok_or_else(|| format!("expected a tensor {name:?} {shape}, found none"))?;
        if tensor.rank() != rank || tensor.elem_count() == 0 {
            return Err(format!("expected {name:?} to be {shape}, got {:?}", tensor.dims()).into());
        }
        Ok(tensor)
    };
    let features = get("features", "[images, positions, width]", 3)?.to_dtype(DType::F32)?;
    let ids = get("ids", "[images]", 1)?;
    if ids.dtype() != DType::I64 {
        return Err(format!("expected \"ids\" of int64, got {:?}", ids.dtype()).into());
    }
    let ids = ids.to_vec1::<i64>()?;
    if ids.len() != features.dim(0)? {
        return Err(
            format!("expected as many \"ids\" as \"features\", got {} and {}", ids.len(), features.dim(0)?).into()
        );
    }
    Ok((features, ids))
}

/// Returns the image, the words of the caption and the part that a line has.
fn parse(line: &str) -> Result<(i64, String, usize)> {
    let value: Value = serde_json::from_str(line)?;
    let get = |name: &str| value.get(name).ok_or_else(|| format!("expected an object with {name:?}, got {line}"));
    let id = get("image_id")?;
    let id = id.as_i64().ok_or_else(|| format!("expected a whole number as \"image_id\", got {id}"))?;
    let caption = get("caption")?;
    let caption = caption.as_str().ok_or_else(|| format!("expected a text as \"caption\", got {caption}"))?;
    let split = get("split")?;
    let part = split.as_str().and_then(|split| SPLITS.iter().position(|name| *name == split));
    let part = part.ok_or_else(|| format!("expected train, valid or test as \"split\", got {split}"))?;
    let words = tokens(caption);
    if words.is_empty() {
        return Err(format!("expected a caption with words, got {caption:?}").into());
    }
    Ok((id, words, part))
}

/// Returns the lower-cased words of a caption, which end at whitespace and at all punctuation but hyphens and
/// apostrophes within words. The evaluation of COCO, by the tokenizer of the Penn Treebank, also splits "isn't" into
/// "is" and "n't".
fn tokens(caption: &str) -> String {
    let lower = caption.to_lowercase();
    let is_of_word = |c: char| c.is_alphanumeric() || c == '-' || c == '\'';
    let words = lower.split(|c| !is_of_word(c)).map(|word| word.trim_matches(|c: char| !c.is_alphanumeric()));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("captions_{name}_{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn write_features(path: &Path, features: &[usize], ids: &[i64]) {
        let features = Tensor::ones(features, DType::F32, &Device::Cpu).unwrap();
        let ids = Tensor::new(ids, &Device::Cpu).unwrap();
        let tensors = HashMap::from([("features".to_owned(), features), ("ids".to_owned(), ids)]);
        candle_core::safetensors::save(&tensors, path).unwrap();
    }

    #[test]
    fn captions_of_an_image_are_together_in_its_part() {
        let folder = folder("files");
        let (features, captions) = (folder.join("f.safetensors"), folder.join("c.jsonl"));
        write_features(&features, &[3, 4, 2], &[70, 5, 9]);
        let line = |id: i64, text: &str, split: &str| {
            serde_json::json!({ "image_id": id, "caption": text, "split": split }).to_string() + "\n"
        };
        let lines = [line(9, "A dog, isn't it?", "train"), line(70, "Two -- cats!", "valid"), line(9, "dog", "train")];
        std::fs::write(&captions, lines.concat()).unwrap();
        let read = || dataset(&features, &captions, &Device::Cpu);
        let found = read().unwrap();
        let example = |image, captions: &[&str]| Example {
            image,
            captions: captions.iter().map(|&text| text.to_owned()).collect(),
        };
        assert_eq!(found.train, [example(2, &["a dog isn't it", "dog"])]);
        assert_eq!(found.scored(), ("valid", &[example(0, &["two cats"])][..]));

        let error = |wrong: &str| {
            std::fs::write(&captions, lines.concat() + wrong).unwrap();
            read().err().unwrap().to_string()
        };
        for (wrong, expected) in [
            (line(8, "a", "train"), "no image_id 8"),
            (line(9, "a", "test"), "image_id 9 is in the split test, but before in train"),
            (line(5, "a", "dev"), "got \"dev\""),
            (line(5, "...", "test"), "with words, got \"...\""),
            ("{\"image_id\": \"5\", \"caption\": \"a\", \"split\": \"test\"}".into(), "whole number"),
            ("{\"image_id\": 5, \"split\": \"test\"}".into(), "\"caption\""),
            ("{".into(), "EOF"),
        ] {
            let error = error(&wrong);
            assert!(error.contains("c.jsonl line 4") && error.contains(expected), "{error}");
        }
        std::fs::write(&captions, &lines[0]).unwrap();
        assert!(read().err().unwrap().to_string().contains("no line has the split \"valid\""));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn features_that_do_not_fit_are_errors() {
        let folder = folder("features");
        let path = folder.join("f.safetensors");
        let error = |path: &Path| dataset(path, Path::new("none"), &Device::Cpu).err().unwrap().to_string();
        for (features, ids, expected) in [
            (&[3, 4][..], &[1, 2, 3][..], "got [3, 4]"),
            (&[3, 4, 2], &[1, 2], "got 2 and 3"),
            (&[2, 4, 2], &[1, 1], "twice"),
            (&[2, 4, 2], &[1, 2], "--captions none"),
        ] {
            write_features(&path, features, ids);
            let error = error(&path);
            assert!(error.contains(expected), "{error}");
        }
        std::fs::write(&path, "no tensors").unwrap();
        assert!(error(&path).contains("f.safetensors"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
