#!/usr/bin/env bash
# Follows the recipe of lab/README.md, "A model of candle-transformers", to the letter: copies qwen2.rs of
# candle-transformers out of cargo's registry into a crate in a temporary folder, applies the lines, compiles them with
# the code below them, and trains a small model with random weights. It fails if a line does not apply or compile, if a
# variable gets no gradient, if the loss does not fall, or if a model that loads the weights has another loss.
set -euo pipefail
[[ ${1:-} != --help ]] || { sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit; }
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/src"
cp Cargo.lock "$folder"
cat >"$folder/Cargo.toml" <<TOML
[package]
name = "recipe"
version = "0.0.0"
edition = "2021"
[dependencies]
candle-core = "0.11.1"
candle-nn = "0.11.1"
candle-transformers = "0.11.1"
mos-head = { path = "$PWD" }
serde = { version = "1", features = ["derive"] }
[workspace]
TOML

# The blocks of the section in this language.
blocks() {
    sed -n '/^### A model of candle-transformers$/,/^## /p' lab/README.md | sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" | sed '/^```/d'
}
blocks diff >"$folder/lines.diff"
blocks rust >"$folder/src/main.rs"
[ -s "$folder/lines.diff" ] && [ -s "$folder/src/main.rs" ] || { echo "lab/README.md has no recipe" >&2; exit 1; }

cat >>"$folder/src/main.rs" <<'RUST'

fn main() -> Result<()> {
    let device = candle_core::Device::Cpu;
    for tie_word_embeddings in [true, false] {
        let config = qwen2::Config {
            vocab_size: 50,
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 16,
            sliding_window: 16,
            max_window_layers: 2,
            tie_word_embeddings,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-6,
            use_sliding_window: false,
            hidden_act: candle_nn::Activation::Silu,
        };
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &device);
        let mut model = qwen2::Model::new(&config, vb.clone())?;
        let head = output_layer(&config, &vb)?;
        let mut optimizer = AdamW::new_lr(vars.all_vars(), 0.01)?;
        let ids: Vec<u32> = (0..2 * 9).map(|i| i * 7 % 50).collect();
        let token_ids = Tensor::from_vec(ids, (2, 9), &device)?;
        let mut values = vec![];
        for _ in 0..3 {
            values.push(step(&mut model, &head, &token_ids, &vars, &mut optimizer)?.value.to_scalar::<f32>()?);
        }
        println!("{} variables, all with a gradient; losses {values:?}", vars.all_vars().len());
        // A model that is built anew and loads the variables.
        vars.save("trained.safetensors")?;
        let mut others = VarMap::new();
        let vb = VarBuilder::from_varmap(&others, candle_core::DType::F32, &device);
        let (mut other_model, other_head) = (qwen2::Model::new(&config, vb.clone())?, output_layer(&config, &vb)?);
        others.load("trained.safetensors")?;
        for (model, head, vars) in [(&mut model, &head, &vars), (&mut other_model, &other_head, &others)] {
            let mut optimizer = AdamW::new_lr(vars.all_vars(), 0.01)?;
            values.push(step(model, head, &token_ids, vars, &mut optimizer)?.value.to_scalar::<f32>()?);
        }
        assert_eq!(values[3], values[4], "the loss of the loaded model differs");
        values.pop();
        assert!(values.windows(2).all(|pair| pair[1] < pair[0]), "the loss does not fall: {values:?}");
    }
    Ok(())
}
RUST

manifest=$(cargo metadata --manifest-path "$folder/Cargo.toml" --format-version 1 |
    grep -o '"manifest_path":"[^"]*/candle-transformers-[^"]*"' | cut -d '"' -f 4)
cp "$(dirname "$manifest")/src/models/qwen2.rs" "$folder/src/qwen2.rs"
patch --fuzz=0 "$folder/src/qwen2.rs" "$folder/lines.diff"

export CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}/check-recipe")
cd "$folder"
cargo run
