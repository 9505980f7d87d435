fn main() {
    let mut graphs = vec![];
    for path in std::env::args().skip(1) {
        let v: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        if v.is_array() { for g in v.as_array().unwrap() { graphs.push(serde_json::from_value(g.clone()).unwrap()); } }
        else if v.get("graphs").is_some() { for g in v["graphs"].as_array().unwrap() { graphs.push(serde_json::from_value(g.clone()).unwrap()); } }
        else { graphs.push(serde_json::from_value(v).unwrap()); }
    }
    let part = autokernel_search::partition::partition(&graphs);
    let device = autokernel_core::plan::Device { sms: 0, shared: 0, cores: 2 };
    for (r, o) in &part.regions {
        println!("== {} x{} {:?} inputs {} outputs {}", r.id, o.len(), r.op_names(), r.inputs.len(), r.outputs.len());
        for f in autokernel_search::propose(r, &device).unwrap() { println!("{}", f.source); }
    }
    println!("{:#?}", part.left);
}
