//! This example fine-tunes a quantised model with low-rank adapters (Dettmers et al.: QLoRA. NeurIPS 2023, arXiv
//! 2305.14314): a small model of Llama's shape learns a language, is written to a GGUF file in 6 bits, and learns
//! another through adapters on its attention and its head, while the file's tensors stay as they are.
//!
//!     cargo run --release --example qlora
//!
//! After token t comes 5 t + 1, 5 t + 2 or 5 t + 3 (modulo 999), each with probability 1/3: the entropy is ln 3 = 1.099
//! nats per position. In the other language it is the one of the three that 3 divides, with certainty.
//!
//! A copy depends on candle-core 0.11, candle-nn 0.11, mos-head 0.6, rand 0.9 and serde_json 1, without features.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor, D};
use candle_nn::rotary_emb::rope_slow;
use candle_nn::{ops, AdamW, Init, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use mos_head::parts::{LowRankAdapter, LowRankConfig, QuantisedLinear};
use mos_head::{LossOptions, OutputLayer, SoftmaxHead};
use rand::{rngs::StdRng, Rng, SeedableRng};

const VOCAB: usize = 999;
const HIDDEN: usize = 256;
const INNER: usize = 512;
const HEADS: usize = 4;
const LAYERS: usize = 2;
const RANK: usize = 8;
const ALPHA: f64 = 16.0;
const BATCH: usize = 8;
const SEQ: usize = 16;
/// What PEFT puts before the names of a model's tensors.
const PEFT: &str = "base_model.model";

/// Where a model's parameters are.
enum Parameters<'a> {
    /// Variables in f32.
    Trained(VarBuilder<'a>),
    /// The tensors of a GGUF file, and the variables of adapters.
    Frozen(&'a HashMap<String, Arc<QTensor>>, VarBuilder<'a>),
}

impl Parameters<'_> {
    fn linear(&self, name: &str, outputs: usize, inputs: usize, is_adapted: bool) -> Result<Adapted> {
        let (base, vb): (Box<dyn Module>, _) = match self {
            Parameters::Trained(vb) => (Box::new(candle_nn::linear_no_bias(inputs, outputs, vb.pp(name))?), vb),
            Parameters::Frozen(file, vb) => {
                (Box::new(QuantisedLinear::new(file[&format!("{name}.weight")].clone(), None)?), vb)
            }
        };
        let adapter = match self {
            Parameters::Frozen(..) if is_adapted => {
                let vb = vb.pp(PEFT).pp(name);
                let within = 1.0 / (inputs as f64).sqrt();
                let a =
                    vb.get_with_hints((RANK, inputs), "lora_A.weight", Init::Uniform { lo: -within, up: within })?;
                Some((a, vb.get_with_hints((outputs, RANK), "lora_B.weight", Init::Const(0.0))?))
            }
            _ => None,
        };
        Ok(Adapted { base, adapter })
    }
}

/// A linear layer with an adapter beside it, `x W^T + s (x A^T) B^T`.
struct Adapted {
    base: Box<dyn Module>,
    adapter: Option<(Tensor, Tensor)>,
}

impl Module for Adapted {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.base.forward(x)?;
        let Some((a, b)) = &self.adapter else { return Ok(y) };
        y + (x.broadcast_matmul(&a.t()?)?.broadcast_matmul(&b.t()?)? * (ALPHA / RANK as f64))?
    }
}

struct Block {
    query: Adapted,
    key: Adapted,
    value: Adapted,
    output: Adapted,
    gate: Adapted,
    up: Adapted,
    down: Adapted,
}

impl Block {
    fn new(parameters: &Parameters, layer: usize) -> Result<Self> {
        let attention =
            |name: &str| parameters.linear(&format!("model.layers.{layer}.self_attn.{name}"), HIDDEN, HIDDEN, true);
        let mlp = |name: &str, outputs, inputs| {
            parameters.linear(&format!("model.layers.{layer}.mlp.{name}"), outputs, inputs, false)
        };
        Ok(Block {
            query: attention("q_proj")?,
            key: attention("k_proj")?,
            value: attention("v_proj")?,
            output: attention("o_proj")?,
            gate: mlp("gate_proj", INNER, HIDDEN)?,
            up: mlp("up_proj", INNER, HIDDEN)?,
            down: mlp("down_proj", HIDDEN, INNER)?,
        })
    }

    /// Computes the block without candle's fused operations, which have no backward pass.
    fn forward(&self, x: &Tensor, [cos, sin, mask]: [&Tensor; 3]) -> Result<Tensor> {
        let (batch, seq, _) = x.dims3()?;
        let normed = norm(x)?;
        let split = |layer: &Adapted| {
            layer.forward(&normed)?.reshape((batch, seq, HEADS, HIDDEN / HEADS))?.transpose(1, 2)?.contiguous()
        };
        let (query, key) = (rope_slow(&split(&self.query)?, cos, sin)?, rope_slow(&split(&self.key)?, cos, sin)?);
        let scores = (query.matmul(&key.t()?)? / ((HIDDEN / HEADS) as f64).sqrt())?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&split(&self.value)?)?;
        let x = (x + self.output.forward(&mixed.transpose(1, 2)?.reshape((batch, seq, HIDDEN))?)?)?;
        let normed = norm(&x)?;
        let inner = (self.gate.forward(&normed)?.silu()? * self.up.forward(&normed)?)?;
        x + self.down.forward(&inner)?
    }
}

/// Normalises without a gain, which keeps this example short.
fn norm(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

/// The hidden states of tokens `[batch, seq]`, from their rows of the embedding.
fn hidden(blocks: &[Block], embedded: Tensor) -> Result<Tensor> {
    let inverse = (0..HIDDEN / HEADS / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / (HIDDEN / HEADS) as f32));
    let inverse = Tensor::from_iter(inverse, &Device::Cpu)?.unsqueeze(0)?;
    let angles = Tensor::arange(0f32, SEQ as f32, &Device::Cpu)?.unsqueeze(1)?.matmul(&inverse)?;
    let later = (0..SEQ).flat_map(|i| (0..SEQ).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
    let mask = Tensor::from_iter(later, &Device::Cpu)?.reshape((SEQ, SEQ))?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let states = blocks.iter().try_fold(embedded, |x, block| block.forward(&x, [&cos, &sin, &mask]))?;
    norm(&states)
}

/// The two languages.
#[derive(Clone, Copy)]
enum Language {
    First,
    Other,
}

/// Inputs and targets `[batch, seq]`.
fn batch(language: Language, rng: &mut StdRng) -> Result<[Tensor; 2]> {
    let mut texts = Vec::new();
    for _ in 0..BATCH {
        let mut token = rng.random_range(0..VOCAB as u32);
        for _ in 0..=SEQ {
            texts.push(token);
            let mut next = (1..4).map(|i| (5 * token + i) % VOCAB as u32);
            token = match language {
                Language::First => next.collect::<Vec<_>>()[rng.random_range(0..3)],
                Language::Other => next.find(|next| next % 3 == 0).unwrap_or(0),
            };
        }
    }
    let texts = Tensor::from_vec(texts, (BATCH, SEQ + 1), &Device::Cpu)?;
    Ok([texts.narrow(1, 0, SEQ)?.contiguous()?, texts.narrow(1, 1, SEQ)?.contiguous()?])
}

/// Trains these variables, and returns the mean loss of the last steps.
fn train(
    vars: &VarMap,
    language: Language,
    steps: usize,
    loss: impl Fn(&Tensor, &Tensor) -> Result<mos_head::Loss>,
) -> Result<f32> {
    let mut optimizer = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 2e-3, weight_decay: 0.0, ..Default::default() })?;
    let (mut rng, mut last) = (StdRng::seed_from_u64(1), Vec::new());
    for step in 0..steps {
        let [inputs, targets] = batch(language, &mut rng)?;
        let loss = loss(&inputs, &targets)?;
        let gradients = loss.backward()?;
        if step == 0 {
            loss.check_gradients(&gradients, vars)?;
        }
        optimizer.step(&gradients)?;
        last.push(loss.value.to_scalar::<f32>()?);
        if step % 50 == 0 {
            eprintln!("step {step}: loss {:.3}", last[step]);
        }
    }
    Ok(last[steps - 20..].iter().sum::<f32>() / 20.0)
}

/// A quantised model with adapters.
struct Quantised {
    embedding: Arc<QTensor>,
    blocks: Vec<Block>,
    head: SoftmaxHead,
}

impl Quantised {
    fn new(file: &HashMap<String, Arc<QTensor>>, vb: VarBuilder) -> Result<Self> {
        let adapter =
            LowRankAdapter::new(&LowRankConfig::new(VOCAB, HIDDEN, RANK).with_alpha(ALPHA), vb.pp(PEFT).pp("lm_head"))?;
        let parameters = Parameters::Frozen(file, vb);
        // The embedding is the decoder too: both are the same tensor of the file.
        let embedding = file["model.embed_tokens.weight"].clone();
        Ok(Quantised {
            blocks: (0..LAYERS).map(|layer| Block::new(&parameters, layer)).collect::<Result<_>>()?,
            head: SoftmaxHead::from_quantised(embedding.clone(), None)?.with_adapter(adapter)?,
            embedding,
        })
    }

    fn loss(&self, inputs: &Tensor, targets: &Tensor, options: &LossOptions) -> Result<mos_head::Loss> {
        let states = hidden(&self.blocks, self.embedding.embedding(inputs)?)?;
        Ok(self.head.loss(&states, targets, options)?)
    }

    /// The loss of a fixed batch.
    fn evaluate(&self, language: Language) -> Result<f32> {
        let [inputs, targets] = batch(language, &mut StdRng::seed_from_u64(2))?;
        self.loss(&inputs, &targets, &LossOptions::evaluation())?.value.to_scalar()
    }
}

/// Trains a model in f32, and writes it to a GGUF file in 6 bits.
fn write_model(path: &Path) -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let init = Init::Randn { mean: 0.0, stdev: 0.05 };
    let embedding = vb.get_with_hints((VOCAB, HIDDEN), "model.embed_tokens.weight", init)?;
    let parameters = Parameters::Trained(vb);
    let blocks = (0..LAYERS).map(|layer| Block::new(&parameters, layer)).collect::<Result<Vec<_>>>()?;
    let head = SoftmaxHead::from_tensors(embedding.clone(), None)?;
    let embedding = candle_nn::Embedding::new(embedding, HIDDEN);
    let loss = train(&vars, Language::First, 300, |inputs, targets| {
        Ok(head.loss(&hidden(&blocks, embedding.forward(inputs)?)?, targets, &LossOptions::default())?)
    })?;
    println!("a model in f32 learns the first language: loss {loss:.3}");
    let vars = vars.data().lock().expect("the variables");
    let quantise =
        |(name, var): (&String, &candle_core::Var)| Ok((name.clone(), QTensor::quantize(var, GgmlDType::Q6K)?));
    let tensors = vars.iter().map(quantise).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path)?, &[], &tensors)
}

fn main() -> Result<()> {
    // On few cores, candle's threads that spin between operations slow others down.
    // SAFETY: No other thread runs yet.
    unsafe { std::env::set_var("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100") };
    let folder = std::env::temp_dir().join(format!("mos-head-qlora-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("model.gguf");
    write_model(&path)?;

    let mut file = File::open(&path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let read = |name: &String| Ok((name.clone(), Arc::new(content.tensor(&mut file, name, &Device::Cpu)?)));
    let tensors: HashMap<String, Arc<QTensor>> = content.tensor_infos.keys().map(read).collect::<Result<_>>()?;
    let vars = VarMap::new();
    let model = Quantised::new(&tensors, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let [first, other] = [model.evaluate(Language::First)?, model.evaluate(Language::Other)?];
    println!("in 6 bits: loss {first:.3}, and {other:.3} in the other language");

    let loss =
        train(&vars, Language::Other, 150, |inputs, targets| model.loss(inputs, targets, &LossOptions::default()))?;
    println!("adapters learn the other language: loss {loss:.3}");

    // PEFT's files, which name each adapter by its module: those of the attention and of the head together.
    vars.save(folder.join("adapter_model.safetensors"))?;
    let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"];
    let config = serde_json::json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules,
    });
    std::fs::write(folder.join("adapter_config.json"), config.to_string())?;
    let mut loaded = VarMap::new();
    let again = Quantised::new(&tensors, VarBuilder::from_varmap(&loaded, DType::F32, &Device::Cpu))?;
    loaded.load(folder.join("adapter_model.safetensors"))?;
    // The crate's reader gives the same two matrices.
    let head_adapter = LowRankAdapter::load(&folder, again.head.decoder())?;
    let [before, after] = [model.evaluate(Language::Other)?, again.evaluate(Language::Other)?];
    println!("saved and loaded: loss {after:.3}, before {before:.3}");
    assert_eq!(before, after);
    assert_eq!((head_adapter.rank(), head_adapter.scale()), (RANK, ALPHA / RANK as f64));
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
