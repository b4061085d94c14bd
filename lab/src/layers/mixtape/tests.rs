use super::*;
use candle_core::Device;
use candle_nn::VarMap;

const CONFIG: MixtapeConfig = MixtapeConfig { hidden: 5, vocab: 13, context: 4, gate: 3, frequent: 6, dropout: 0.0 };

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Returns a head whose parameters are random and not small, with its variables.
fn head(config: MixtapeConfig) -> (Mixtape, Vec<Var>) {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let counts: Vec<f64> = (0..config.vocab).map(|id| (id * 5 % config.vocab) as f64).collect();
    let head = Mixtape::new(config, &counts, vb).expect("valid sizes");
    let mut rng = StdRng::seed_from_u64(3);
    let variables: Vec<Var> = varmap.all_vars();
    for variable in &variables {
        let values: Vec<f32> = (0..variable.elem_count()).map(|_| rng.random_range(-1.0..1.0)).collect();
        variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
    }
    (head, variables)
}

fn hidden() -> Var {
    let mut rng = StdRng::seed_from_u64(4);
    let values: Vec<f32> = (0..7 * 5).map(|_| rng.random_range(-1.0..1.0)).collect();
    Var::from_tensor(&Tensor::from_vec(values, (7, 5), &Device::Cpu).unwrap()).unwrap()
}

fn targets() -> Tensor {
    Tensor::new(&[0i64, 12, 5, -100, 3, 3, 8], &Device::Cpu).unwrap()
}

/// The logits by the equations, one at a time.
fn plain_logits(head: &Mixtape, hidden: &[f64]) -> Vec<f64> {
    let MixtapeConfig { vocab, context, gate, frequent, .. } = head.config;
    let [latent, latent_bias, weight, bias, gate_latent, gate_weight, gate_rows, gate_bias] =
        head.parameters.all().map(numbers);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let row = |matrix: &[f64], i: usize, width: usize| matrix[i * width..][..width].to_vec();
    let sigma = |x: f64| 1.0 / (1.0 + (-x).exp());
    let places: Vec<u32> = head.places.to_vec1().unwrap();
    let logit = |id: usize| {
        let place = places[id] as usize;
        let l = |j: usize| {
            let common = dot(&row(&gate_weight, j, hidden.len()), hidden);
            let own = (0..gate).map(|i| {
                gate_rows[place * gate + i] * dot(&row(&gate_latent, j * gate + i, hidden.len()), hidden).tanh()
            });
            if place < frequent {
                common + own.sum::<f64>() + gate_bias[j * frequent + place]
            } else {
                common
            }
        };
        let s = [sigma(l(0)), sigma(l(1)), sigma(l(2))];
        let priors = [s[0] * s[1], s[0] * (1.0 - s[1]), (1.0 - s[0]) * s[2], (1.0 - s[0]) * (1.0 - s[2])];
        let product = |k: usize| {
            let element = |i: usize| {
                let i = k * context + i;
                (dot(&row(&latent, i, hidden.len()), hidden) + latent_bias[i]).tanh()
            };
            (0..context).map(|i| element(i) * weight[id * context + i]).sum::<f64>()
        };
        (0..COMPONENTS).map(|k| priors[k] * product(k)).sum::<f64>() + bias[id]
    };
    (0..vocab).map(logit).collect()
}

#[test]
fn log_probabilities_follow_the_equations() {
    for frequent in [0, 6, 13] {
        let (head, _) = head(MixtapeConfig { frequent, ..CONFIG });
        let hidden = hidden();
        let found = numbers(&head.log_probs(&hidden).unwrap());
        for (found, hidden) in found.chunks(13).zip(numbers(&hidden).chunks(5)) {
            let z = plain_logits(&head, hidden);
            let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
            assert!(found.iter().zip(&z).all(|(found, z)| (found - (z - lse)).abs() < 1e-5), "{frequent}");
        }
    }
}

#[test]
fn gradients_of_every_parameter_are_central_differences() {
    let (head, variables) = head(CONFIG);
    let hidden = hidden();
    let all: Vec<&Var> = variables.iter().chain([&hidden]).collect();
    for reduction in [Reduction::Mean, Reduction::Sum] {
        let options = LossOptions::new().with_ignore_index(-100).with_reduction(reduction);
        let value = || {
            let loss = head.loss(&hidden, &targets(), &options).unwrap();
            numbers(&loss.nll).iter().sum::<f64>() / if reduction == Reduction::Mean { 6.0 } else { 1.0 }
        };
        let loss = head.loss(&hidden, &targets(), &options).unwrap();
        assert!((numbers(&loss.value)[0] - value()).abs() < 1e-5);
        let gradients = loss.backward().unwrap();
        for variable in &all {
            let gradient = numbers(gradients.get(variable.as_tensor()).expect("a gradient"));
            assert!(gradient.iter().any(|g| *g != 0.0));
            let start: Vec<f32> = variable.flatten_all().unwrap().to_vec1().unwrap();
            for i in (0..start.len()).step_by(3) {
                let at = |step: f32| {
                    let mut values = start.clone();
                    values[i] += step;
                    variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
                    value()
                };
                let difference = (at(0.02) - at(-0.02)) / 0.04;
                at(0.0);
                assert!(
                    (difference - gradient[i]).abs() < 2e-3,
                    "{:?} {i}: {difference} {}",
                    variable.dims(),
                    gradient[i]
                );
            }
        }
    }
}

#[test]
fn a_loss_without_a_reduction_has_the_same_gradients() {
    let (head, variables) = head(CONFIG);
    let hidden = hidden();
    let options = LossOptions::new().with_ignore_index(-100);
    let gradients = |options: &LossOptions| {
        let value = head.loss(&hidden, &targets(), options).unwrap().value.sum_all().unwrap();
        let gradients = value.backward().unwrap();
        variables.iter().flat_map(|variable| numbers(gradients.get(variable).unwrap())).collect::<Vec<_>>()
    };
    let sum = gradients(&options.clone().with_reduction(Reduction::Sum));
    let each = gradients(&options.with_reduction(Reduction::None));
    assert!(sum.iter().zip(&each).all(|(a, b)| (a - b).abs() < 1e-5));
}

#[test]
fn no_positions_have_a_loss() {
    let (head, _) = head(CONFIG);
    let hidden = Tensor::zeros((0, 5), DType::F32, &Device::Cpu).unwrap();
    let targets = Tensor::zeros(0, DType::U32, &Device::Cpu).unwrap();
    assert_eq!(numbers(&head.loss(&hidden, &targets, &LossOptions::new()).unwrap().value), [0.0]);
    assert_eq!(head.log_probs(&hidden).unwrap().dims(), [0, 13]);
}

#[test]
fn contexts_are_dropped_in_training_alone() {
    let (head, _) = head(MixtapeConfig { dropout: 0.5, ..CONFIG });
    let value = |options: LossOptions| {
        numbers(&head.loss(&hidden(), &targets(), &options.with_ignore_index(-100)).unwrap().value)[0]
    };
    let seeded = |seed| value(LossOptions::new().with_dropout(DropoutMasks::Seeded(seed)));
    assert_eq!(seeded(1), seeded(1));
    assert_ne!(seeded(1), seeded(2));
    assert_eq!(value(LossOptions::evaluation()), value(LossOptions::evaluation()));
}

#[test]
fn the_sizes_of_equal_parameters_are_close() {
    let config = MixtapeConfig::equal_to_softmax(10_000, 220);
    let softmax = 10_000 * 221;
    assert!(config.parameters().abs_diff(softmax) * 200 < softmax, "{config:?}");
    let (_, variables) = head(CONFIG);
    assert_eq!(variables.iter().map(|variable| variable.elem_count()).sum::<usize>(), CONFIG.parameters());
}
