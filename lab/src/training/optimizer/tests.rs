use super::*;
use crate::show::DeviceKind;
use candle_core::Device;

/// Returns a variable with these values.
fn variable(values: &Tensor, dtype: DType) -> (Var, VarMap) {
    let (var, varmap) = (Var::from_tensor(&values.to_dtype(dtype).unwrap()).unwrap(), VarMap::new());
    varmap.data().lock().unwrap().insert("values".into(), var.clone());
    (var, varmap)
}

/// Returns a variable after 20 steps that minimize the sum of its fourth powers.
fn trained(kind: OptimizerKind, dtype: DType, device: &Device) -> Vec<f32> {
    let values = Tensor::new(&[[0.5f32, -2.0, 3.0], [0.1, 4.0, -0.3]], device).unwrap();
    let (var, varmap) = variable(&values, dtype);
    let mut optimizer = Optimizer::new(kind, 0.0, &varmap).unwrap();
    for _ in 0..20 {
        let sum = var.sqr().unwrap().sqr().unwrap().sum_all().unwrap();
        optimizer.step(&sum.backward().unwrap(), 0.05, 0.7).unwrap();
    }
    var.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn updates_in_place_equal_those_from_ordinary_operations() {
    for kind in [OptimizerKind::Adam, OptimizerKind::Adagrad] {
        let in_place = trained(kind, DType::F32, &Device::Cpu);
        // All but f32 on the CPU uses the ordinary operations.
        let mut ordinary = vec![trained(kind, DType::F64, &Device::Cpu)];
        let devices = DeviceKind::value_variants().iter().filter_map(|kind| kind.open().ok());
        ordinary.extend(devices.map(|device| trained(kind, DType::F32, &device)));
        for values in ordinary {
            for (a, b) in in_place.iter().zip(&values) {
                assert!((a - b).abs() < 1e-4, "{kind:?} {in_place:?} {values:?}");
            }
        }
    }
}

/// A step of Adagrad divides by the root of its start and the squares of all gradients so far.
#[test]
fn adagrad_follows_its_equation() {
    let (var, varmap) = variable(&Tensor::new(&[2f64, -4.0], &Device::Cpu).unwrap(), DType::F64);
    let mut optimizer = Optimizer::new(OptimizerKind::Adagrad, 0.0, &varmap).unwrap();
    let (mut values, mut sums) = ([2.0, -4.0], [ADAGRAD_START; 2]);
    for _ in 0..5 {
        let gradients = var.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        optimizer.step(&gradients, 0.2, 0.0).unwrap();
        for (value, sum) in values.iter_mut().zip(&mut sums) {
            let gradient: f64 = 2.0 * *value;
            *sum += gradient * gradient;
            *value -= 0.2 * gradient / f64::sqrt(*sum);
        }
        let found = var.to_vec1::<f64>().unwrap();
        assert!(found.iter().zip(values).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {values:?}");
    }
}

#[test]
fn gradients_can_be_clipped_where_names_begin_alike() {
    let varmap = VarMap::new();
    let [inside, outside] = ["lstm.0", "head.0"].map(|name| {
        let var = Var::from_tensor(&Tensor::new(&[3f64, 4.0], &Device::Cpu).unwrap()).unwrap();
        varmap.data().lock().unwrap().insert(name.into(), var.clone());
        var
    });
    let mut optimizer = Optimizer::new(OptimizerKind::Sgd, 0.0, &varmap).unwrap().with_clipped("lstm.");
    // The gradients are the values, of norm 5 each.
    let half_squares = (inside.sqr().unwrap() + outside.sqr().unwrap()).unwrap().sum_all().unwrap() * 0.5;
    optimizer.step(&half_squares.unwrap().backward().unwrap(), 1.0, 1.0).unwrap();
    let close = |var: &Var, expected: [f64; 2]| {
        assert!(var.to_vec1::<f64>().unwrap().iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{var:?}");
    };
    close(&inside, [2.4, 3.2]);
    close(&outside, [0.0, 0.0]);
}

/// The values of golden/asgd.py, in f32 with updates in place and in f64 with ordinary operations.
#[test]
fn averaged_sgd_equals_that_of_pytorch() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("../golden/asgd.json")).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        let rows = value.as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
        rows.map(|number| number.as_f64().unwrap()).collect()
    };
    let number = |key: &str| golden[key].as_f64().unwrap();
    // To clip, PyTorch divides by the norm plus 1e-6.
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-8)] {
        let start = Tensor::from_vec(numbers(&golden["start"]), (2, 3), &Device::Cpu).unwrap();
        let (var, varmap) = variable(&start, dtype);
        let mut optimizer = Optimizer::new(OptimizerKind::Sgd, number("weight_decay"), &varmap).unwrap();
        optimizer.start_averaging().unwrap();
        for (i, step) in golden["steps"].as_array().unwrap().iter().enumerate() {
            let check = |name: &str| {
                let found = var.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                for (found, expected) in found.iter().zip(numbers(&step[name])) {
                    assert!((found - expected).abs() < tolerance, "{dtype:?} step {i} {name}: {found} {expected}");
                }
            };
            optimizer.swap().unwrap();
            let gradients = var.sqr().unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
            optimizer.step(&gradients, step["lr"].as_f64().unwrap(), number("clip")).unwrap();
            check("parameter");
            optimizer.swap().unwrap();
            check("average");
        }
    }
}

/// Against the sum over all steps t of t (t + 1) .. (t + power - 1) times the parameters after them.
#[test]
fn a_polynomial_average_weights_step_t_by_a_power_of_t() {
    for (kind, power) in [(OptimizerKind::Sgd, 1), (OptimizerKind::Sgd, 3), (OptimizerKind::Adam, 2)] {
        let (var, varmap) = variable(&Tensor::new(&[2f64, -4.0], &Device::Cpu).unwrap(), DType::F64);
        let mut optimizer = Optimizer::new(kind, 0.0, &varmap).unwrap();
        optimizer.start_polynomial_averaging(power).unwrap();
        let (mut sum, mut total) = ([0.0; 2], 0.0);
        for t in 1..=20 {
            optimizer.swap().unwrap();
            let gradients = var.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            optimizer.step(&gradients, 0.05, 0.0).unwrap();
            let weight: f64 = (t..t + power).map(|factor| factor as f64).product();
            let values = var.to_vec1::<f64>().unwrap();
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
            total += weight;
            optimizer.swap().unwrap();
            for (found, sum) in var.to_vec1::<f64>().unwrap().iter().zip(sum) {
                assert!((found - sum / total).abs() < 1e-12, "{kind:?} {power} step {t}: {found} {}", sum / total);
            }
        }
    }
}

#[test]
fn weight_decay_is_that_of_every_optimizer() {
    for (kind, dtype) in
        OptimizerKind::value_variants().iter().flat_map(|kind| [(*kind, DType::F32), (*kind, DType::F64)])
    {
        let (var, varmap) = variable(&Tensor::new(&[2f64, -4.0], &Device::Cpu).unwrap(), dtype);
        let mut optimizer = Optimizer::new(kind, 0.1, &varmap).unwrap();
        // With a gradient of zero only the decay is left.
        let zero = (var.as_tensor() - var.as_tensor().detach()).unwrap().sqr().unwrap();
        let gradients = zero.sum_all().unwrap().backward().unwrap();
        optimizer.step(&gradients, 0.5, 0.0).unwrap();
        let values = var.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        assert!((values[0] - 1.9).abs() < 1e-6 && (values[1] + 3.8).abs() < 1e-6, "{kind:?} {dtype:?} {values:?}");
    }
}

#[test]
fn gradients_of_parts_add_up_to_those_of_the_whole() {
    let (var, varmap) = variable(&Tensor::new(&[1f32, -2.0], &Device::Cpu).unwrap(), DType::F32);
    let optimizer = Optimizer::new(OptimizerKind::Sgd, 0.0, &varmap).unwrap();
    let gradients = |factor: f64| (var.sqr().unwrap() * factor).unwrap().sum_all().unwrap().backward().unwrap();
    let mut sum = None;
    for (factor, share) in [(1.0, 0.25), (2.0, 0.25), (4.0, 0.5)] {
        sum = Some(optimizer.accumulate(sum, gradients(factor), share).unwrap());
    }
    let found = sum.unwrap().get(&var).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(found, [5.5, -11.0]);
}
